/* Boxes. Every cut of a parameter over tensor ranks is one or two rectangles of the canonical tensor, and every part of
 * a flat array is at most three of each; so two cuts meet in rectangles again, and a plan is a list of those. The
 * invariant: over all tensor ranks the boxes with replica 0 cover the padded tensor once. */
#include "checkpoint/box.h"

/* `rows` rows from `first` on, behind those of the boxes before. */
static int add_rows(loom__shard_box *boxes, int count, int64_t first, int64_t rows, int64_t columns, int64_t replica) {
    int64_t at = 0;
    for (int i = 0; i < count; i++)
        at += boxes[i].box.count[0] * columns;
    boxes[count] = (loom__shard_box){
        .box = {.first = {first, 0}, .count = {rows, columns}, .at = at, .stride = columns}, .replica = replica};
    return count + 1;
}

static int add_groups(const loom_model_config *config, int64_t columns, int64_t tp, int64_t tp_rank,
    loom__shard_box boxes[LOOM__SHARD_BOXES]) {
    int64_t n = config->num_attention_heads, g = config->num_query_groups, d = config->kv_channels;
    int64_t group_rows = (n / g + 2) * d;
    if (tp <= g)
        return add_rows(boxes, 0, tp_rank * (g / tp) * group_rows, g / tp * group_rows, columns, 0);
    int64_t sharers = tp / g, heads = n / tp, group = tp_rank / sharers * group_rows, member = tp_rank % sharers;
    int count = add_rows(boxes, 0, group + member * heads * d, heads * d, columns, 0);
    return add_rows(boxes, count, group + n / g * d, 2 * d, columns, member);
}

int loom__shard_boxes(const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp,
    int64_t tp_rank, loom__shard_box boxes[LOOM__SHARD_BOXES]) {
    int64_t rows = parameter->padded_rows, columns = parameter->shape[1];
    switch (parameter->shard) {
    case LOOM__SHARD_SLICE:
        if (parameter->shard_axis == 0)
            return add_rows(boxes, 0, tp_rank * (rows / tp), rows / tp, columns, 0);
        add_rows(boxes, 0, 0, rows, columns / tp, 0);
        boxes[0].box.first[1] = tp_rank * (columns / tp);
        return 1;
    case LOOM__SHARD_GATE_UP:
        rows = rows / 2 / tp;
        add_rows(boxes, 0, tp_rank * rows, rows, columns, 0);
        return add_rows(boxes, 1, parameter->shape[0] / 2 + tp_rank * rows, rows, columns, 0);
    case LOOM__SHARD_QKV_GROUPS:
        return add_groups(&spec->config, columns, tp, tp_rank, boxes);
    default:
        return add_rows(boxes, 0, 0, rows, columns, tp_rank);
    }
}

int loom__box_range(const loom__box *box, int64_t first, int64_t count, int64_t at, loom__box out[LOOM__RANGE_BOXES]) {
    int64_t columns = box->count[1], elements = box->count[0] * columns;
    int64_t from = first - box->at, to = from + count; /* counted from the first element of the box */
    if (from < 0)
        from = 0;
    if (to > elements)
        to = elements;
    int made = 0;
    while (from < to) {
        int64_t column = from % columns, width = columns - column, rows = 1;
        if (width > to - from)
            width = to - from;
        if (width == columns)
            rows = (to - from) / columns;
        out[made++] = (loom__box){.first = {box->first[0] + from / columns, box->first[1] + column},
            .count = {rows, width},
            .at = at + from + box->at - first,
            .stride = columns};
        from += rows * width;
    }
    return made;
}

bool loom__box_meet(const loom__box *from, const loom__box *to, loom__box_copy *copy) {
    int64_t first[2], count[2];
    for (int i = 0; i < 2; i++) {
        int64_t from_end = from->first[i] + from->count[i], to_end = to->first[i] + to->count[i];
        int64_t end = from_end < to_end ? from_end : to_end;
        first[i] = from->first[i] > to->first[i] ? from->first[i] : to->first[i];
        count[i] = end - first[i];
        if (count[i] <= 0)
            return false;
    }
    *copy = (loom__box_copy){.rows = count[0],
        .columns = count[1],
        .from = from->at + (first[0] - from->first[0]) * from->stride + first[1] - from->first[1],
        .from_stride = from->stride,
        .to = to->at + (first[0] - to->first[0]) * to->stride + first[1] - to->first[1],
        .to_stride = to->stride};
    return true;
}
