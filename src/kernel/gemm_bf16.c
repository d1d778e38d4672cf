/* The provider's own product of bf16. oneDNN offers it as a primitive: it is made for each tile, which costs little as
 * the library keeps what it has compiled for a shape. Whether the library uses bf16 instructions is asked of the
 * library, which knows the processor and what the user forbade it (ONEDNN_MAX_CPU_ISA). */
#include "kernel/gemm.h"
#include "kernel/gemm16.h"

#if defined(MEGALOOM_GEMM_DNNL)
#include <dnnl.h>

bool loom__gemm_bf16_is_native(void) {
    unsigned wanted = dnnl_cpu_isa_avx512_core_bf16, found = (unsigned)dnnl_get_effective_cpu_isa();
    return found != dnnl_cpu_isa_all && (found & wanted) == wanted;
}

typedef struct matrix {
    dnnl_memory_desc_t desc;
    dnnl_memory_t memory;
} matrix;

typedef struct call {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_attr_t attributes;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive;
    matrix a, b, c;
} call;

static dnnl_status_t describe(
    matrix *x, int64_t rows, int64_t cols, bool transposed, int64_t ld, dnnl_data_type_t type) {
    return dnnl_memory_desc_init_by_strides(
        &x->desc, 2, (dnnl_dims_t){rows, cols}, type, transposed ? (dnnl_dims_t){1, ld} : (dnnl_dims_t){ld, 1});
}

static dnnl_status_t set_attributes(call *made, float alpha, bool accumulate) {
    dnnl_status_t status = dnnl_primitive_attr_create(&made->attributes);
    if (!status && alpha != 1.0f)
        status = dnnl_primitive_attr_set_output_scales(made->attributes, 1, 0, &alpha);
    if (status || !accumulate)
        return status;
    dnnl_post_ops_t adds = NULL;
    status = dnnl_post_ops_create(&adds);
    if (!status)
        status = dnnl_post_ops_append_sum(adds, 1.0f);
    if (!status)
        status = dnnl_primitive_attr_set_post_ops(made->attributes, adds);
    dnnl_post_ops_destroy(adds);
    return status;
}

static dnnl_status_t attach(call *made, matrix *x, const void *data) {
    return dnnl_memory_create(&x->memory, &x->desc, made->engine, (void *)(uintptr_t)data);
}

static void destroy(call *made) {
    dnnl_memory_destroy(made->a.memory);
    dnnl_memory_destroy(made->b.memory);
    dnnl_memory_destroy(made->c.memory);
    dnnl_primitive_destroy(made->primitive);
    dnnl_primitive_desc_destroy(made->desc);
    dnnl_primitive_attr_destroy(made->attributes);
    dnnl_stream_destroy(made->stream);
    dnnl_engine_destroy(made->engine);
}

static dnnl_status_t prepare(call *made, const void *a, const void *b, void *c) {
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_engine_create(&made->engine, dnnl_cpu, 0);
    if (!status)
        status = dnnl_stream_create(&made->stream, made->engine, dnnl_stream_default_flags);
    if (!status)
        status = dnnl_matmul_desc_init(&matmul, &made->a.desc, &made->b.desc, NULL, &made->c.desc);
    if (!status)
        status = dnnl_primitive_desc_create(&made->desc, &matmul, made->attributes, made->engine, NULL);
    if (!status)
        status = dnnl_primitive_create(&made->primitive, made->desc);
    if (!status)
        status = attach(made, &made->a, a);
    if (!status)
        status = attach(made, &made->b, b);
    return status ? status : attach(made, &made->c, c);
}

bool loom__gemm_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t *a,
    int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c, float *c32, int64_t ldc) {
    call made = {0};
    int before = loom__gemm_begin_alone();
    dnnl_status_t status = describe(&made.a, m, k, trans_a, lda, dnnl_bf16);
    if (!status)
        status = describe(&made.b, k, n, trans_b, ldb, dnnl_bf16);
    if (!status)
        status = describe(&made.c, m, n, false, ldc, c ? dnnl_bf16 : dnnl_f32);
    if (!status)
        status = set_attributes(&made, alpha, accumulate);
    if (!status)
        status = prepare(&made, a, b, c ? (void *)c : (void *)c32);
    if (!status) {
        dnnl_exec_arg_t arguments[] = {
            {DNNL_ARG_SRC, made.a.memory}, {DNNL_ARG_WEIGHTS, made.b.memory}, {DNNL_ARG_DST, made.c.memory}};
        status = dnnl_primitive_execute(made.primitive, made.stream, 3, arguments);
    }
    if (!status)
        status = dnnl_stream_wait(made.stream);
    destroy(&made);
    loom__gemm_end_alone(before);
    return status == dnnl_success;
}

#else

bool loom__gemm_bf16_is_native(void) {
    return false;
}

bool loom__gemm_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t *a,
    int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c, float *c32, int64_t ldc) {
    (void)trans_a, (void)trans_b, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb;
    (void)accumulate, (void)c, (void)c32, (void)ldc;
    return false;
}

#endif
