/* The operations of kernel_tables.c, written once and read for each kind of table: fp32, the double reference, 16-bit
 * elements. Each takes inputs 0…5 and a prefilled output. Set by the reader: TABLE; REAL; OP(name); INPUT and OUTPUT,
 * the types of what is given; E(i) and R(i), input i as elements and as REAL; OUT_E and OUT_R, the output as either. */

static void OP(bias_add)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->bias_add(team, z->rows, z->cols, E(0), R(1), OUT_E);
}

static void OP(bias_gradient)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->bias_gradient(team, z->rows, z->cols, E(0), z->variant & 1, OUT_R);
}

static void OP(add)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->add(team, z->rows * z->cols, E(0), OUT_E);
}

static void OP(scale)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->scale(team, z->rows * z->cols, (REAL)-1.5, E(0), OUT_E);
}

static void OP(activation)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->activation(team, (loom_activation)(z->variant / 2), z->rows, z->cols, E(0), z->variant & 1 ? R(1) : NULL, OUT_E);
}

static void OP(activation_backward)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->activation_backward(
        team, (loom_activation)(z->variant / 2), z->rows, z->cols, E(0), z->variant & 1 ? R(1) : NULL, E(2), OUT_E);
}

static void OP(bias_dropout_add)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    loom_dropout dropout = {z->variant & 1 ? 0.3f : 0.0f, 77, 3, LOOM_DROPOUT_MLP};
    k->bias_dropout_add(team, &z->coordinates, z->cols, &dropout, E(0), z->variant & 2 ? R(1) : NULL,
        z->variant & 4 ? E(2) : NULL, OUT_E);
}

static void OP(dropout_backward)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    loom_dropout dropout = {z->variant & 1 ? 0.3f : 0.0f, 77, 3, LOOM_DROPOUT_MLP};
    k->dropout_backward(team, &z->coordinates, z->cols, &dropout, E(0), OUT_E);
}

static void OP(layernorm)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t count = z->rows * z->cols;
    k->layernorm(team, z->rows, z->cols, (REAL)0.25, E(0), R(1), R(2), OUT_E, OUT_R + count, OUT_R + count + z->rows);
}

static void OP(layernorm_backward_input)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->layernorm_backward_input(team, z->rows, z->cols, E(0), R(1), R(2), R(3), E(4), OUT_E);
}

static void OP(layernorm_backward_weight)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->layernorm_backward_weight(
        team, z->rows, z->cols, E(0), R(1), R(2), E(3), z->variant & 1, OUT_R, OUT_R + z->cols);
}

static void OP(rmsnorm)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->rmsnorm(team, z->rows, z->cols, (REAL)0.25, E(0), R(1), OUT_E, OUT_R + z->rows * z->cols);
}

static void OP(rmsnorm_backward_input)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->rmsnorm_backward_input(team, z->rows, z->cols, E(0), R(1), R(2), E(3), OUT_E);
}

static void OP(rmsnorm_backward_weight)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->rmsnorm_backward_weight(team, z->rows, z->cols, E(0), R(1), E(2), z->variant & 1, OUT_R);
}

/* A table shard of 5 rows from 3 on; tokens are 0 … 10, so some lie on each side. */
static void OP(embedding)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->embedding(team, z->rows, z->cols, z->tokens, 3, 5, E(0), OUT_E);
}

static void OP(embedding_backward)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    k->embedding_backward(team, z->rows, z->cols, z->tokens, 3, 5, E(0), z->variant & 1, OUT_R);
}

/* cols is the head dimension; fused [q q k v] with 2 groups, of which q, q and k are rotated, or 3 heads side by side.
 */
static void OP(rope)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t d = z->cols, stride = z->variant & 1 ? 8 * d : 3 * d;
    int64_t rotary = z->variant & 2 ? d / 4 * 2 : d / 2 * 2;
    memcpy(OUT_E, E(0), (size_t)(z->rows * stride) * sizeof *OUT_E);
    k->rope(team, z->coordinates.s, z->coordinates.b, stride, z->variant & 1 ? 2 : 1, 3, 4 * d, d, rotary, R(1), R(2),
        z->variant & 4 ? z->positions : NULL, 2, z->variant & 1, OUT_E);
}

static void OP(cross_entropy_local)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t valid = z->variant & 1 ? z->cols - z->cols / 3 : z->cols;
    k->cross_entropy_local(
        team, z->rows, z->cols, valid, E(0), z->tokens, 2, OUT_R, OUT_R + z->rows, OUT_R + 2 * z->rows);
}

static void OP(cross_entropy_backward)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t valid = z->variant & 1 ? z->cols - z->cols / 3 : z->cols;
    memcpy(OUT_E, E(0), (size_t)(z->rows * z->cols) * sizeof *OUT_E);
    REAL *sum = OUT_R + z->rows * z->cols;
    for (int64_t r = 0; r < z->rows; r++)
        sum[r] = 8 + R(2)[r];
    k->cross_entropy_backward(team, z->rows, z->cols, valid, OUT_E, z->tokens, 2, R(1), sum, R(3));
}

#ifndef NARROW
static void OP(exact_sum)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    loom_exact_sum sum = {0};
    int power = 1 + (z->variant & 1);
    k->exact_sum(team, power, z->rows * z->cols, R(0), &sum);
    OUT_R[0] = (REAL)(sum.nonfinite ? (double)NAN : loom_exact_sum_value(&sum, power));
}

static void OP(adamw)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t count = z->rows * z->cols;
    loom_adamw adamw = {
        1e-2, 0.1, 0.9, 0.999, 1e-8, 1 - 0.9 * 0.9, 1 - 0.999 * 0.999, 0.5f, .coupled_decay = z->variant & 1};
    REAL *v = OUT_R + 2 * count;
    for (int64_t i = 0; i < count; i++)
        v[i] = R(1)[i] * R(1)[i];
    REAL *v_max = OUT_R + 3 * count;
    for (int64_t i = 0; i < count; i++)
        v_max[i] = R(1)[i];
    k->adamw(team, count, &adamw, R(0), OUT_R, OUT_R + count, v, z->variant & 2 ? v_max : NULL);
}

static void OP(sgd)(const TABLE *k, loom_team *team, const shape *z, INPUT in, OUTPUT out) {
    int64_t count = z->rows * z->cols;
    loom_sgd sgd = {1e-2, 0.1, 0.9, 0.3, z->variant & 2, 0.5f};
    k->sgd(team, count, &sgd, R(0), OUT_R, z->variant & 1 ? OUT_R + count : NULL);
}
#endif
