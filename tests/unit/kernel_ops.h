/* The operations of kernel_tables.c, written once and read twice: for float and a table under test, and for double and
 * the reference. Each takes inputs in[0…5] and a prefilled output. TABLE, REAL and OP(name) are set by the reader. */

static void OP(bias_add)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->bias_add(team, z->rows, z->cols, in[0], in[1], out);
}

static void OP(bias_gradient)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->bias_gradient(team, z->rows, z->cols, in[0], z->variant & 1, out);
}

static void OP(add)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->add(team, z->rows * z->cols, in[0], out);
}

static void OP(scale)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->scale(team, z->rows * z->cols, (REAL)-1.5, in[0], out);
}

static void OP(activation)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->activation(team, (loom_activation)(z->variant / 2), z->rows, z->cols, in[0], z->variant & 1 ? in[1] : NULL, out);
}

static void OP(activation_backward)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->activation_backward(
        team, (loom_activation)(z->variant / 2), z->rows, z->cols, in[0], z->variant & 1 ? in[1] : NULL, in[2], out);
}

static void OP(bias_dropout_add)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    loom_dropout dropout = {z->variant & 1 ? 0.3f : 0.0f, 77, 3, LOOM_DROPOUT_MLP};
    k->bias_dropout_add(team, &z->coordinates, z->cols, &dropout, in[0], z->variant & 2 ? in[1] : NULL,
        z->variant & 4 ? in[2] : NULL, out);
}

static void OP(dropout_backward)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    loom_dropout dropout = {z->variant & 1 ? 0.3f : 0.0f, 77, 3, LOOM_DROPOUT_MLP};
    k->dropout_backward(team, &z->coordinates, z->cols, &dropout, in[0], out);
}

static void OP(layernorm)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t count = z->rows * z->cols;
    k->layernorm(team, z->rows, z->cols, (REAL)0.25, in[0], in[1], in[2], out, out + count, out + count + z->rows);
}

static void OP(layernorm_backward_input)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->layernorm_backward_input(team, z->rows, z->cols, in[0], in[1], in[2], in[3], in[4], out);
}

static void OP(layernorm_backward_weight)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->layernorm_backward_weight(
        team, z->rows, z->cols, in[0], in[1], in[2], in[3], z->variant & 1, out, out + z->cols);
}

static void OP(rmsnorm)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->rmsnorm(team, z->rows, z->cols, (REAL)0.25, in[0], in[1], out, out + z->rows * z->cols);
}

static void OP(rmsnorm_backward_input)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->rmsnorm_backward_input(team, z->rows, z->cols, in[0], in[1], in[2], in[3], out);
}

static void OP(rmsnorm_backward_weight)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->rmsnorm_backward_weight(team, z->rows, z->cols, in[0], in[1], in[2], z->variant & 1, out);
}

/* A table shard of 5 rows from 3 on; tokens are 0 … 10, so some lie on each side. */
static void OP(embedding)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->embedding(team, z->rows, z->cols, z->tokens, 3, 5, in[0], out);
}

static void OP(embedding_backward)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    k->embedding_backward(team, z->rows, z->cols, z->tokens, 3, 5, in[0], z->variant & 1, out);
}

/* cols is the head dimension; fused [q q k v] with 2 groups, of which q, q and k are rotated, or 3 heads side by side.
 */
static void OP(rope)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t d = z->cols, stride = z->variant & 1 ? 8 * d : 3 * d;
    int64_t rotary = z->variant & 2 ? d / 4 * 2 : d / 2 * 2;
    memcpy(out, in[0], (size_t)(z->rows * stride) * sizeof *out);
    k->rope(team, z->coordinates.s, z->coordinates.b, stride, z->variant & 1 ? 2 : 1, 3, 4 * d, d, rotary, in[1], in[2],
        z->variant & 4 ? z->positions : NULL, 2, z->variant & 1, out);
}

static void OP(cross_entropy_local)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t valid = z->variant & 1 ? z->cols - z->cols / 3 : z->cols;
    k->cross_entropy_local(team, z->rows, z->cols, valid, in[0], z->tokens, 2, out, out + z->rows, out + 2 * z->rows);
}

static void OP(cross_entropy_backward)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t valid = z->variant & 1 ? z->cols - z->cols / 3 : z->cols;
    memcpy(out, in[0], (size_t)(z->rows * z->cols) * sizeof *out);
    REAL *sum = out + z->rows * z->cols;
    for (int64_t r = 0; r < z->rows; r++)
        sum[r] = 8 + in[2][r];
    k->cross_entropy_backward(team, z->rows, z->cols, valid, out, z->tokens, 2, in[1], sum, in[3]);
}

static void OP(exact_sum)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    loom_exact_sum sum = {0};
    int power = 1 + (z->variant & 1);
    k->exact_sum(team, power, z->rows * z->cols, in[0], &sum);
    out[0] = (REAL)(sum.nonfinite ? (double)NAN : loom_exact_sum_value(&sum, power));
}

static void OP(adamw)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t count = z->rows * z->cols;
    loom_adamw adamw = {
        1e-2, 0.1, 0.9, 0.999, 1e-8, 1 - 0.9 * 0.9, 1 - 0.999 * 0.999, 0.5f, .coupled_decay = z->variant & 1};
    REAL *v = out + 2 * count;
    for (int64_t i = 0; i < count; i++)
        v[i] = in[1][i] * in[1][i];
    REAL *v_max = out + 3 * count;
    for (int64_t i = 0; i < count; i++)
        v_max[i] = in[1][i];
    k->adamw(team, count, &adamw, in[0], out, out + count, v, z->variant & 2 ? v_max : NULL);
}

static void OP(sgd)(const TABLE *k, loom_team *team, const shape *z, REAL *const *in, REAL *out) {
    int64_t count = z->rows * z->cols;
    loom_sgd sgd = {1e-2, 0.1, 0.9, 0.3, z->variant & 2, 0.5f};
    k->sgd(team, count, &sgd, in[0], out, z->variant & 1 ? out + count : NULL);
}
