/* The maps of gradient buffers against Megatron-Core's: places, buckets, shards, which buffers there are, and by what
 * their gradients are multiplied in all. There a rank's loss is the mean over its own tokens, here its gradient is
 * seeded with the number of tokens of all ranks, so that what must agree is the product. Left out are cases that the
 * reference refuses: the mean in the collective together with a loss per token, which it divides later. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ddp/plan.h"
#include "support/golden.h"
#include <math.h>

enum { MOST = 64 };

static int64_t at(const json_t *rows, size_t row, size_t column) {
    return json_integer_value(json_array_get(json_array_get(rows, row), column));
}

static void is(const char *id, const char *what, int64_t row, int64_t found, int64_t wanted) {
    if (found != wanted)
        fail_msg(
            "%s: %s of %lld is %lld, expected %lld", id, what, (long long)row, (long long)found, (long long)wanted);
}

static bool flag(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_true(value) || json_integer_value(value) != 0;
}

/* Calls check for each case of each file that fits and has numbers. */
static void each_case(const char *pattern, void (*check)(const json_t *item, const char *id)) {
    glob_t files = golden_glob(pattern);
    int ran = 0, left = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            if (json_object_get(item, "error")) {
                left++;
                continue;
            }
            check(item, golden_string(item, "id", "?"));
            ran++;
        }
        json_decref(file);
    }
    globfree(&files);
    printf("%s: %d cases ran, %d left out\n", pattern, ran, left);
    assert_true(ran > 0);
}

static void check_shards(
    const json_t *item, const char *id, int64_t count, const loom__ddp_place *places, const loom__ddp_bucket *buckets) {
    int64_t dp = golden_int(item, "dp", 1);
    const json_t *shards = json_object_get(item, "shards");
    if (!shards)
        return;
    for (int64_t shard = 0; shard < dp; shard++) {
        const json_t *rows = json_array_get(shards, (size_t)shard);
        size_t row = 0;
        for (int64_t place = 0; place < count; place++) {
            const loom__ddp_bucket *bucket = &buckets[places[place].bucket];
            loom__ddp_part part = loom__ddp_part_of(&places[place], bucket, dp, shard);
            int64_t first = bucket->start + shard * ((bucket->end - bucket->start) / dp);
            if (part.count == 0)
                continue;
            const int64_t found[] = {places[place].bucket, count - 1 - place, part.start, part.start + part.count,
                part.start - bucket->start, part.start - first, part.start - first + part.count,
                part.start - places[place].start, part.start - places[place].start + part.count};
            for (size_t column = 0; column < 9; column++)
                is(id, "a column of a shard", (int64_t)(100 * row + column), found[column], at(rows, row, column));
            is(id, "state", place, part.state, bucket->start / dp + part.start - first);
            row++;
        }
        is(id, "number of ranges", shard, (int64_t)row, (int64_t)json_array_size(rows));
    }
}

static void check_map(const json_t *item, const char *id) {
    const json_t *numel = json_object_get(item, "numel"), *params = json_object_get(item, "params"),
                 *wanted = json_object_get(item, "buckets"), *value;
    const loom__ddp_map_options options = {.bucket_size = golden_int(item, "bucket_size", -1),
        .alignment = 1,
        .shards = flag(item, "distributed_optimizer") ? golden_int(item, "dp", 1) : 0,
        .pad_for_high_busbw = flag(item, "pad_for_busbw")};
    loom__ddp_entry entries[MOST] = {0};
    loom__ddp_place places[MOST];
    loom__ddp_bucket buckets[MOST];
    int64_t bucket_count = 0, elements = 0, unpadded = 0, count = (int64_t)json_array_size(numel);
    size_t i;
    assert_true(count <= MOST);
    json_array_foreach(numel, i, value) entries[i].count = json_integer_value(value);
    json_array_foreach(json_object_get(item, "shared_embedding"), i, value) entries[json_integer_value(value)]
        .shared_embedding = true;
    if (loom__ddp_map(entries, count, &options, places, buckets, &bucket_count, &elements))
        fail_msg("%s: %s", id, loom_error_message());
    is(id, "buffer_numel", 0, elements, golden_int(item, "buffer_numel", -1));
    is(id, "number of buckets", 0, bucket_count, (int64_t)json_array_size(wanted));
    for (i = 0; i < (size_t)count; i++) {
        const loom__ddp_place *place = &places[(size_t)count - 1 - i];
        is(id, "start", (int64_t)i, place->start, at(params, i, 0));
        is(id, "end", (int64_t)i, place->start + place->count, at(params, i, 1));
        is(id, "bucket", (int64_t)i, place->bucket, at(params, i, 2));
    }
    for (i = 0; i < (size_t)bucket_count; i++) {
        is(id, "start of bucket", (int64_t)i, buckets[i].start, at(wanted, i, 0));
        is(id, "end of bucket", (int64_t)i, buckets[i].end, at(wanted, i, 1));
        is(id, "unpadded length of bucket", (int64_t)i, buckets[i].unpadded, at(wanted, i, 2));
        unpadded += buckets[i].unpadded;
    }
    is(id, "buffer_numel_unpadded", 0, unpadded, golden_int(item, "buffer_numel_unpadded", -1));
    check_shards(item, id, count, places, buckets);
}

static void places_buckets_and_shards_equal_megatrons(void **state) {
    (void)state;
    each_case("optim/buffers*.json", check_map);
}

static loom_dtype dtype_of(const json_t *object, const char *key) {
    return strcmp(golden_string(object, key, "float32"), "bfloat16") == 0 ? LOOM_BF16 : LOOM_F32;
}

/* By what the sum of the gradients of the ranks' own means is multiplied, of all ranks that have had tokens: with a
 * loss per token the reference divides by their number at the end, so that it is 1 until then. */
static void check_scale(
    const char *id, const loom__ddp_plan_buffer *found, const json_t *item, const json_t *wanted, bool averages) {
    double ranks = (double)(golden_int(item, "dp", 1) * golden_int(item, "cp", 1));
    double theirs = json_number_value(json_object_get(wanted, "scale"));
    theirs /= averages ? (double)golden_int(wanted, "group_size", 0) : 1.0;
    double seed = (averages ? ranks : 1.0) / (flag(item, "per_token_loss") ? 1.0 : ranks), ours = seed * found->scale;
    if (!(fabs(ours - theirs) <= 1e-12 * theirs))
        fail_msg("%s: gradients of a buffer are multiplied by %g in all, expected %g", id, ours, theirs);
}

static void check_buffer(const char *id, const loom__ddp_plan_buffer *found, const json_t *wanted) {
    const json_t *params = json_object_get(wanted, "params"), *buckets = json_object_get(wanted, "buckets");
    is(id, "param_dtype", 0, found->param_dtype, dtype_of(wanted, "param_dtype"));
    is(id, "grad_dtype", 0, found->grad_dtype, dtype_of(wanted, "grad_dtype"));
    is(id, "numel", 0, found->elements, golden_int(wanted, "numel", -1));
    is(id, "number of parameters", 0, found->count, (int64_t)json_array_size(params));
    is(id, "number of buckets", 0, found->bucket_count, (int64_t)json_array_size(buckets));
    for (size_t i = 0; i < (size_t)found->count; i++) {
        const loom__ddp_place *place = &found->places[(size_t)found->count - 1 - i];
        is(id, "parameter", (int64_t)i, found->indices[i], at(params, i, 0));
        is(id, "start", (int64_t)i, place->start, at(params, i, 1));
        is(id, "end", (int64_t)i, place->start + place->count, at(params, i, 2));
        is(id, "bucket", (int64_t)i, place->bucket, at(params, i, 3));
    }
    for (size_t i = 0; i < (size_t)found->bucket_count; i++) {
        is(id, "start of bucket", (int64_t)i, found->buckets[i].start, at(buckets, i, 0));
        is(id, "end of bucket", (int64_t)i, found->buckets[i].end, at(buckets, i, 1));
    }
}

static void check_plan(const json_t *item, const char *id) {
    const json_t *params = json_object_get(item, "params"), *set = json_object_get(item, "options"),
                 *dense = json_object_get(item, "dense"), *expert = json_object_get(item, "expert"), *param;
    int64_t dp = golden_int(item, "dp", 1), count = (int64_t)json_array_size(params), dense_buckets = 0;
    const loom__ddp_plan_options options = {
        .grad_reduce_in_fp32 = flag(set, "grad_reduce_in_fp32"),
        .overlap_grad_reduce = flag(set, "overlap_grad_reduce"),
        .disable_bucketing = flag(item, "disable_bucketing") || golden_int(item, "pp_rank", 0) > 0,
        .use_distributed_optimizer = flag(set, "use_distributed_optimizer"),
        .pad_buckets_for_high_nccl_busbw = flag(set, "pad_buckets_for_high_nccl_busbw"),
        .bucket_size = golden_int(set, "bucket_size", -1),
        .data_parallel = dp,
        .dense_shards = dp * golden_int(item, "cp", 1),
        .expert_shards = golden_int(item, "edp", 1),
        .dense_group = dp * golden_int(item, "cp", 1),
        .average_in_collective = flag(set, "average_in_collective"),
        .alignment = 1,
    };
    loom__ddp_parameter list[MOST] = {0};
    loom__ddp_plan plan;
    size_t i, buffers = json_array_size(dense) + json_array_size(expert);
    assert_true(count <= MOST);
    json_array_foreach(params, i, param) {
        const char *flags = json_string_value(json_array_get(param, 1));
        list[i] =
            (loom__ddp_parameter){.entry = {.count = at(params, i, 0), .shared_embedding = strchr(flags, 's') != NULL},
                .dtype = strchr(flags, 'f') ? LOOM_F32 : LOOM_BF16,
                .expert = strchr(flags, 'e') != NULL,
                .frozen = strchr(flags, 'n') != NULL};
    }
    if (loom__ddp_plan_make(list, count, &options, &plan))
        fail_msg("%s: %s", id, loom_error_message());
    is(id, "bucket_size", 0, plan.bucket_size, golden_int(item, "bucket_size", -1));
    is(id, "number of buffers", 0, plan.buffer_count, (int64_t)buffers);
    for (i = 0; i < buffers; i++) {
        bool experts = i >= json_array_size(dense);
        is(id, "expert", (int64_t)i, plan.buffers[i].expert, experts);
        const json_t *wanted = experts ? json_array_get(expert, i - json_array_size(dense)) : json_array_get(dense, i);
        check_buffer(id, &plan.buffers[i], wanted);
        check_scale(id, &plan.buffers[i], item, wanted, options.average_in_collective);
        dense_buckets += experts ? 0 : plan.buffers[i].bucket_count;
    }
    is(id, "number of bucket groups", 0, dense_buckets,
        (int64_t)json_array_size(json_object_get(item, "bucket_groups")));
    loom__ddp_plan_free(&plan);
}

static void buffers_of_a_rank_equal_megatrons(void **state) {
    (void)state;
    each_case("optim/ddp*.json", check_plan);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_buckets_and_shards_equal_megatrons),
        cmocka_unit_test(buffers_of_a_rank_equal_megatrons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
