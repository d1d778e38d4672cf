/* What the golden tests of whole models share. One rank function walks all cases and layouts of its world size; the
 * same program runs it on thread ranks (worlds of 1, 2 and 4) and, under a launcher, on MPI ranks (the world it was
 * given). A rank returns its first failed comparison as an error whose message names case, layout, tensor, found,
 * wanted and tolerance; only the main thread asserts. */
#ifndef TESTS_GOLDEN_MODEL_H
#define TESTS_GOLDEN_MODEL_H

#include "support/golden.h"
#include <math.h>
#include <megaloom/megaloom.h>
#include <setjmp.h>
#include <unistd.h>

#include <cmocka.h>

enum { GOLDEN_TEXT = 160, GOLDEN_PATH = 4096, GOLDEN_MESSAGE = 4096 };

/* ---- reading the references (main thread; a tree that cannot be read ends the program) */

static inline void golden_must(loom_status status, const char *what) {
    if (status == LOOM_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, loom_error_message());
    exit(2);
}

static inline void *golden_allocate(size_t bytes) {
    void *memory = calloc(1, bytes + 1);
    if (!memory) {
        fprintf(stderr, "out of memory for %zu bytes\n", bytes);
        exit(2);
    }
    return memory;
}

/* root/format…, on the heap. */
LOOM_PRINTF(1, 2) static inline char *golden_path(const char *format, ...) {
    char *path = golden_allocate(GOLDEN_PATH);
    int used = snprintf(path, GOLDEN_PATH, "%s/", golden_root());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path + used, (size_t)(GOLDEN_PATH - used), format, arguments);
    va_end(arguments);
    return path;
}

/* "b" of "a/b/c.json", on the heap. */
static inline char *golden_folder_name(const char *path) {
    const char *end = path + strlen(path), *first;
    while (end > path && *end != '/')
        end--;
    for (first = end; first > path && first[-1] != '/';)
        first--;
    char *name = golden_allocate((size_t)(end - first));
    memcpy(name, first, (size_t)(end - first));
    return name;
}

static inline float *golden_f32(const loom_safetensors *file, const char *name, int64_t *elements) {
    const loom_safetensors_tensor *tensor = NULL;
    golden_must(loom_safetensors_find(file, name, &tensor), "golden tensor");
    float *values = golden_allocate((size_t)tensor->elements * sizeof *values);
    golden_must(loom_safetensors_read_f32(tensor, 0, tensor->elements, values), name);
    *elements = tensor->elements;
    return values;
}

/* The integers of a tensor of rows: *width is its last dimension, *rows the product of the others. */
static inline int64_t *golden_i64(const loom_safetensors *file, const char *name, int64_t *rows, int64_t *width) {
    const loom_safetensors_tensor *tensor = NULL;
    golden_must(loom_safetensors_find(file, name, &tensor), "golden tensor");
    int64_t *values = golden_allocate((size_t)tensor->elements * sizeof *values);
    golden_must(loom_safetensors_read_i64(tensor, 0, tensor->elements, values), name);
    *width = tensor->dims ? tensor->shape[tensor->dims - 1] : 1;
    *rows = tensor->elements / *width;
    return values;
}

static inline double golden_at(const json_t *object, const char *key, int64_t index) {
    return json_number_value(json_array_get(json_object_get(object, key), (size_t)index));
}

/* Our own tree's cases whose architecture is built: being refused would not do. Another tree (MEGALOOM_GOLDEN) has its
 * own. */
static inline bool golden_must_run(const char *name) {
    static const char *const built[] = {"gemma", "gpt2", "gpt2_tiny4", "llama", "llama3_rope", "llama_attention_bias",
        "llama_bf16", "llama_gqa_tied", "llama_gqa_untied", "llama_mlp_bias", "llama_sharded", "llama_tiny4",
        "mistral_swa", "mixtral", "qwen2", "qwen2_moe", "qwen2_moe_dense_layers", "qwen3", "qwen3_moe",
        "qwen3_moe_dense_layers"};
    bool found = false;
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        found = found || strcmp(name, built[i]) == 0;
    return found && !getenv("MEGALOOM_GOLDEN");
}

/* Reads a case's config.json. False: the architecture or an option is not built, and the refusal said so. */
static inline bool golden_read_config(const char *name, const char *directory, loom_model_config *config) {
    *config = loom_model_config_default("gpt2");
    loom_status status = loom_hf_read_config(directory, config);
    if (status == LOOM_OK)
        return true;
    if (golden_must_run(name) || status != LOOM_ERR_UNSUPPORTED || !strstr(loom_error_message(), "not supported yet")) {
        fprintf(stderr, "%s: expected to be read or refused as \"not supported yet\", found %s: %s\n", name,
            loom_status_name(status), loom_error_message());
        exit(2);
    }
    return false;
}

/* ---- rows of tokens as a data source */

/* labels[row, t] < 0: does not count. */
typedef struct golden_rows {
    int64_t b, s;
    int64_t *tokens, *labels; /* [b, s] */
} golden_rows;

/* From rows of s+1 tokens: inputs are all but the last, labels all but the first. */
static inline golden_rows golden_rows_of_tokens(const loom_safetensors *file, const char *name) {
    golden_rows rows;
    int64_t width;
    int64_t *all = golden_i64(file, name, &rows.b, &width);
    rows.s = width - 1;
    rows.tokens = golden_allocate((size_t)(rows.b * rows.s) * sizeof *all);
    rows.labels = golden_allocate((size_t)(rows.b * rows.s) * sizeof *all);
    for (int64_t j = 0; j < rows.b; j++) {
        memcpy(rows.tokens + j * rows.s, all + j * width, (size_t)rows.s * sizeof *all);
        memcpy(rows.labels + j * rows.s, all + j * width + 1, (size_t)rows.s * sizeof *all);
    }
    free(all);
    return rows;
}

static inline void golden_rows_free(golden_rows *rows) {
    free(rows->tokens);
    free(rows->labels);
}

/* Global batches of `global` consecutive rows; a data-parallel rank takes a contiguous part of each. */
typedef struct golden_source {
    const golden_rows *rows;
    int64_t global, micro, rank, size;
    int64_t microbatch; /* that comes next */
} golden_source;

static inline loom_status golden_next(void *context, loom_batch *batch) {
    golden_source *source = context;
    const golden_rows *rows = source->rows;
    int64_t part = source->global / source->size, steps = part / source->micro, s = rows->s;
    int64_t first =
        source->microbatch / steps * source->global + source->rank * part + source->microbatch % steps * source->micro;
    if (first + source->micro > rows->b)
        return LOOM_END;
    batch->b = source->micro;
    for (int64_t j = 0; j < batch->b; j++) {
        int64_t row = first + j;
        batch->sample[j] = batch->index[j] = row;
        for (int64_t t = 0; t < s; t++) {
            int64_t label = rows->labels[row * s + t];
            batch->tokens[j * s + t] = rows->tokens[row * s + t];
            batch->labels[j * s + t] = label < 0 ? 0 : label;
            batch->loss_mask[j * s + t] = label < 0 ? 0.0f : 1.0f;
            batch->position_ids[j * s + t] = t;
        }
    }
    source->microbatch++;
    return LOOM_OK;
}

/* ---- layouts and models */

typedef struct golden_layout {
    int tp, dp;
    int pp, vpp;        /* stages and chunks of each; 0 = 1 */
    const char *stages; /* pipeline_model_parallel_layout, or NULL */
    bool sp;
    int64_t micro;
    loom_recompute recompute;
    bool replicate;        /* query groups */
    bool overlap;          /* gradients are reduced in small buckets while the backward goes on */
    bool sharded;          /* the distributed optimizer, which gathers parameters during the next forward */
    int instances;         /* of it; 0 = 1 */
    const char *precision; /* NULL = 32 */
    int cp;                /* context ranks; 0 = 1 */
    int ep, etp;           /* ranks that share experts, and that share an expert; 0 = 1, and as tp */
    const char *cp_type;   /* cp_comm_type, or NULL; "a2a+p2p" has 2 ranks in the inner level */
} golden_layout;

/* Some of the tensors of the golden models are larger, most are smaller. */
enum { GOLDEN_BUCKET = 3000 };

static inline void golden_layout_name(const golden_layout *layout, char *text) {
    static const char *const recompute[] = {"", " recompute-selective", " recompute-full"};
    int used = snprintf(text, GOLDEN_TEXT, "tp%d dp%d%s mbs%lld%s%s%s%s", layout->tp, layout->dp,
        layout->sp ? " sp" : "", (long long)layout->micro, layout->replicate ? " replicated-groups" : "",
        recompute[layout->recompute], layout->overlap ? " overlapped" : "", layout->sharded ? " sharded" : "");
    if (layout->instances > 1)
        used += snprintf(text + used, (size_t)(GOLDEN_TEXT - used), " instances%d", layout->instances);
    if (layout->precision)
        used += snprintf(text + used, (size_t)(GOLDEN_TEXT - used), " %s", layout->precision);
    if (layout->cp > 1)
        used += snprintf(text + used, (size_t)(GOLDEN_TEXT - used), " cp%d %s", layout->cp,
            layout->cp_type ? layout->cp_type : "p2p");
    if (layout->ep > 1 || layout->etp)
        used += snprintf(text + used, (size_t)(GOLDEN_TEXT - used), " ep%d etp%d", layout->ep, layout->etp);
    if (layout->pp > 1)
        snprintf(text + used, (size_t)(GOLDEN_TEXT - used), " pp%d%s%.0d%s%s", layout->pp, layout->vpp ? " v" : "",
            layout->vpp, layout->stages ? " " : "", layout->stages ? layout->stages : "");
}

static inline bool golden_groups_divide(const loom_model_config *config, int tp) {
    int64_t groups = config->num_query_groups ? config->num_query_groups : config->num_attention_heads;
    return groups % tp == 0;
}

/* What a layout asks of a case: heads, MLP width, layers, sequence and batch divide, and the query groups do, or can be
 * replicated. */
static inline bool golden_layout_divides(
    const golden_layout *layout, const loom_model_config *config, int64_t s, int64_t batch) {
    int64_t f = config->ffn_hidden_size ? config->ffn_hidden_size : 4 * config->hidden_size;
    if (config->num_attention_heads % layout->tp || f % layout->tp || (layout->sp && s % layout->tp))
        return false;
    /* Tensor ranks route rows of their own. */
    if (config->moe.num_moe_experts > 0 && layout->tp > 1 && !layout->sp)
        return false;
    int64_t ep = layout->ep ? layout->ep : 1;
    /* Instances of the distributed optimizer share out the copies of an expert as well. */
    int64_t etp = layout->etp ? layout->etp : layout->tp, contexts = layout->cp ? layout->cp : 1;
    if (layout->instances > 1 && layout->tp * layout->dp * contexts / (ep * etp) % layout->instances)
        return false;
    if (ep > 1 && (config->moe.num_moe_experts == 0 || config->moe.num_moe_experts % ep))
        return false;
    int64_t cp = layout->cp ? layout->cp : 1,
            groups = config->num_query_groups ? config->num_query_groups : config->num_attention_heads;
    if (cp > 1 && (s % (2 * cp) || (layout->sp && s / cp % layout->tp)))
        return false;
    if (layout->cp_type && strncmp(layout->cp_type, "a2a", 3) == 0 &&
        groups % (layout->tp * (strcmp(layout->cp_type, "a2a") == 0 ? cp : 2)))
        return false;
    if (!golden_groups_divide(config, layout->tp) && layout->tp % config->num_query_groups)
        return false;
    int64_t chunks = (int64_t)(layout->pp ? layout->pp : 1) * (layout->vpp ? layout->vpp : 1);
    if (!layout->stages && config->num_layers % chunks)
        return false;
    return batch % layout->dp == 0 && batch / layout->dp % layout->micro == 0;
}

typedef struct golden_model {
    loom_fabric *fabric;
    loom_parallel *parallel;
} golden_model;

static inline void golden_model_destroy(golden_model *model) {
    loom_parallel_destroy(model->parallel);
    loom_fabric_destroy(model->fabric);
    *model = (golden_model){0};
}

/* The weights of `directory`, or where it is NULL initial ones, on a layout. Destroy also after an error. */
static inline loom_status golden_model_create(loom_rank *rank, const golden_layout *layout, const char *directory,
    const loom_model_config *config, golden_model *model) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    strategy.tensor_model_parallel_size = layout->tp;
    strategy.sequence_parallel = layout->sp;
    strategy.context_parallel_size = layout->cp ? layout->cp : 1;
    strategy.expert_model_parallel_size = layout->ep ? layout->ep : 1;
    strategy.expert_tensor_parallel_size = layout->etp;
    strategy.pipeline_model_parallel_size = layout->pp ? layout->pp : 1;
    strategy.virtual_pipeline_model_parallel_size = layout->vpp;
    strategy.ddp_config.overlap_grad_reduce = layout->overlap;
    strategy.ddp_config.bucket_size = layout->overlap ? GOLDEN_BUCKET : 0;
    strategy.ddp_config.use_distributed_optimizer = strategy.ddp_config.overlap_param_gather = layout->sharded;
    strategy.num_distributed_optimizer_instances = layout->instances ? layout->instances : 1;
    loom_model_config adjusted = *config;
    adjusted.recompute = layout->recompute;
    adjusted.parallel.cp_comm_type[0] = layout->cp_type ? layout->cp_type : "p2p";
    if (layout->cp_type && strcmp(layout->cp_type, "a2a+p2p") == 0) {
        adjusted.parallel.hierarchical_context_parallel_sizes[0] = 2;
        adjusted.parallel.hierarchical_context_parallel_sizes[1] = layout->cp / 2;
    }
    adjusted.parallel.pipeline_model_parallel_layout = layout->stages;
    adjusted.replicate_query_groups = layout->replicate;
    loom_precision_config precision = loom_precision_config_default();
    if (layout->precision)
        precision.precision = layout->precision;
    loom_module *module;
    *model = (golden_model){0};
    LOOM_TRY(loom_fabric_create(rank, &strategy, &precision, &model->fabric));
    LOOM_TRY(loom_fabric_launch(model->fabric));
    LOOM_TRY(directory ? loom_gpt_create_from_hf(model->fabric, directory, &adjusted, &module)
                       : loom_gpt_create(model->fabric, &adjusted, &module));
    LOOM_TRY(loom_fabric_setup_module(model->fabric, module, &model->parallel));
    int dp = loom_comm_size(loom_fabric_group(model->fabric, LOOM_GROUP_DP));
    return dp == layout->dp ? LOOM_OK : loom_fail(LOOM_ERR_INTERNAL, "found dp %d, expected %d", dp, layout->dp);
}

/* `source` must live as long as the batches. */
static inline loom_status golden_batches(const golden_model *model, const golden_rows *rows, int64_t global,
    int64_t micro, bool cut, golden_source *source, loom_batches **batches) {
    loom_comm *dp = loom_fabric_group(model->fabric, LOOM_GROUP_DP);
    *source = (golden_source){.rows = rows,
        .global = global,
        .micro = micro,
        .rank = cut ? loom_comm_rank(dp) : 0,
        .size = cut ? loom_comm_size(dp) : 1};
    loom_data_loader loader = {.context = source,
        .micro_batch_size = micro,
        .sequence_length = rows->s,
        .microbatches = global / source->size / micro,
        .next = golden_next};
    return loom_fabric_setup_loader(model->fabric, &loader, batches);
}

/* As a case's "optimizer" says: Adam in a cosine of Megatron's over so many steps. */
static inline loom_status golden_megatron_optimizer(
    const json_t *adam, int64_t steps, golden_model *model, loom_optimizer **optimizer) {
    loom_optimizer_config config = loom_optimizer_config_default();
    config.lr = golden_number(adam, "lr", 0);
    config.min_lr = golden_number(adam, "min_lr", 0);
    config.weight_decay = golden_number(adam, "wd", 0);
    config.adam_beta1 = golden_number(adam, "beta1", 0);
    config.adam_beta2 = golden_number(adam, "beta2", 0);
    config.adam_eps = golden_number(adam, "eps", 0);
    config.clip_grad = golden_number(adam, "clip", 0);
    loom_optimizer_setup setup = {.schedule = loom_lr_config_default(), .steps = steps};
    setup.schedule.schedule = "megatron-cosine";
    setup.schedule.init_lr = 0;
    setup.schedule.warmup_steps = golden_int(adam, "warmup", 0);
    setup.schedule.lr_decay_steps = golden_int(adam, "decay", 0);
    return loom_fabric_setup_megatron_optimizer(model->fabric, model->parallel, &config, &setup, optimizer);
}

/* Query groups that the tensor ranks cannot share are refused on every rank, naming both numbers and that
 * replicas are legal. */
static inline loom_status golden_check_refusal(loom_rank *rank, const char *name, const golden_layout *layout,
    const char *directory, const loom_model_config *config) {
    golden_layout plain = *layout;
    golden_model model;
    static const char legal[] = "replicate_query_groups true";
    char numbers[2][GOLDEN_TEXT];
    plain.replicate = false;
    loom_status status = golden_model_create(rank, &plain, directory, config, &model);
    golden_model_destroy(&model);
    snprintf(numbers[0], GOLDEN_TEXT, "tensor_model_parallel_size %d", layout->tp);
    snprintf(numbers[1], GOLDEN_TEXT, "num_query_groups %lld", (long long)config->num_query_groups);
    const char *message = status ? loom_error_message() : "";
    if (status == LOOM_ERR_CONFIG && strstr(message, numbers[0]) && strstr(message, numbers[1]) &&
        strstr(message, legal))
        return LOOM_OK;
    char found[GOLDEN_MESSAGE];
    snprintf(found, sizeof found, "%s", message);
    return loom_fail(LOOM_ERR_INTERNAL,
        "%s tp%d: found %s \"%s\", expected LOOM_ERR_CONFIG with \"%s\", \"%s\", \"%s\"", name, layout->tp,
        loom_status_name(status), found, numbers[0], numbers[1], legal);
}

/* ---- comparing */

/* A comparison that a NaN fails. */
static inline loom_status golden_near(
    const char *where, const char *layout, const char *what, double found, double wanted, double tolerance) {
    if (fabs(found - wanted) <= tolerance)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: %s: found %.9g, wanted %.9g, off by %.3g, tolerance %.3g", where,
        layout, what, found, wanted, fabs(found - wanted), tolerance);
}

/* Elementwise against a tolerance; the worst element is named. */
static inline loom_status golden_all_near(const char *where, const char *layout, const char *what, const float *found,
    const float *wanted, int64_t count, double tolerance) {
    int64_t worst = 0;
    double most = -1;
    for (int64_t i = 0; i < count; i++) {
        double off = fabs((double)found[i] - (double)wanted[i]);
        if (off > most || isnan(off)) {
            worst = i;
            most = off;
        }
        if (isnan(off))
            break;
    }
    char element[GOLDEN_TEXT + 32];
    snprintf(element, sizeof element, "%s[%lld]", what, (long long)worst);
    return count ? golden_near(where, layout, element, (double)found[worst], (double)wanted[worst], tolerance)
                 : LOOM_OK;
}

/* ||found - wanted|| <= 1e-4 ||wanted||, both l2 over one tensor. Where the true gradient is zero (the key part of an
 * attention bias: softmax does not see it) ||wanted|| is itself rounding noise and measures nothing: an element is then
 * a sum, over tokens, of d_k's that cancel. The terms are below 1 for a mean loss and sum to below about 1 in size, so
 * that what fp32 (2^-24 = 6e-8) leaves is about 1e-7 an element, 1e-7 sqrt(count) a tensor: the floor. */
static inline loom_status golden_gradient_near(
    const char *where, const char *layout, const char *name, const float *found, const float *wanted, int64_t count) {
    double off = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        double difference = (double)found[i] - (double)wanted[i];
        off += difference * difference;
        norm += (double)wanted[i] * (double)wanted[i];
    }
    off = sqrt(off);
    norm = sqrt(norm);
    double tolerance = fmax(1e-4 * norm, 1e-7 * sqrt((double)count));
    if (off <= tolerance)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_INTERNAL,
        "%s, %s: gradient of %s is off by %.3g in l2 norm, wanted norm %.6g, tolerance %.3g", where, layout, name, off,
        norm, tolerance);
}

static inline uint64_t golden_parameter_hash(loom_parameter *const *parameters, int64_t count, bool experts) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < count; i++) {
        size_t bytes = (size_t)loom_parameter_count(parameters[i]) * loom_dtype_size(parameters[i]->dtype);
        const unsigned char *values = loom_parameter_values(parameters[i]);
        for (size_t b = 0; b < bytes && parameters[i]->expert_parallel == experts; b++)
            hash = (hash ^ values[b]) * 0x100000001b3u;
    }
    return hash;
}

/* Ranks that have the same parameters hold the same bits of them after the same updates. */
static inline loom_status golden_replicas_are_equal(const golden_model *model, const char *where, const char *layout) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(model->parallel, &parameters, &count));
    for (int experts = 0; experts < 2; experts++) {
        loom_comm *replicas = loom_fabric_group(model->fabric, experts ? LOOM_GROUP_EDP : LOOM_GROUP_DP_CP);
        int64_t mine = (int64_t)golden_parameter_hash(parameters, count, experts), all[64] = {0};
        if (loom_comm_size(replicas) > 64)
            return loom_fail(LOOM_ERR_INTERNAL, "more than 64 replicas");
        LOOM_TRY(loom_all_gather(replicas, &mine, all, 1, LOOM_I64));
        for (int i = 0; i < loom_comm_size(replicas); i++)
            if (all[i] != mine)
                return loom_fail(LOOM_ERR_INTERNAL, "%s, %s: parameters differ between data-parallel ranks %d and %d",
                    where, layout, loom_comm_rank(replicas), i);
    }
    return LOOM_OK;
}

static inline loom_status golden_export(
    const golden_model *model, bool gradients, const char *stem, loom_safetensors **file) {
    loom_rank *rank = loom_fabric_rank(model->fabric);
    loom_comm *world = loom_rank_world(rank);
    bool writes = loom_rank_index(rank) == 0;
    char path[GOLDEN_PATH];
    loom_safetensors_writer *writer = NULL;
    loom_status status = LOOM_OK;
    *file = NULL;
    snprintf(path, sizeof path, "%s/golden-%s-%lld.safetensors", MEGALOOM_BUILD, stem, (long long)getpid());
    if (writes)
        status = loom_safetensors_writer_create(path, &writer);
    if (!status && writes)
        status = loom_gpt_describe_hf(model->parallel, writer);
    status = loom_agree(world, status);
    if (!status)
        status = loom_gpt_write_hf(model->parallel, gradients, writer);
    if (!status && writes)
        status = loom_safetensors_writer_finish(writer);
    loom_safetensors_writer_destroy(writer);
    if (!status && writes) {
        status = loom_safetensors_open(path, file);
        unlink(path);
    }
    status = loom_agree(world, status);
    if (status) {
        loom_safetensors_close(*file);
        *file = NULL;
    }
    return status;
}

/* ---- worlds */

/* The layouts of all cases on one world, counted by rank 0 alone. */
typedef struct golden_counts {
    int ran, refused, left_out; /* refused: for their query groups, as they must be, before they ran with replicas */
} golden_counts;

/* The first member of a program's own suite, which is the argument of its rank function and the state of its tests. */
typedef struct golden_suite {
    const char *name;
    const char *left_out; /* why layouts are */
    loom_rank_function walk;
    int cases, unbuilt;
    int threads;          /* of a rank's team; 0 = 1 */
    golden_counts counts; /* of the world that ran last */
    bool is_first;        /* this process holds rank 0 */
    loom_status status;
    char message[GOLDEN_MESSAGE];
} golden_suite;

static inline void golden_log(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_ERROR)
        fprintf(stderr, "%s\n", line);
}

/* Every rank function calls it first. */
static inline void golden_begin(golden_suite *suite, loom_rank *rank) {
    if (loom_rank_index(rank) == 0) {
        suite->is_first = true;
        suite->counts = (golden_counts){0};
    }
}

/* Runs the walk on n thread ranks, or for n = 0 on the ranks of the launcher. */
static inline void golden_run(golden_suite *suite, int n) {
    loom_run_options options = loom_run_options_default();
    options.threads = suite->threads ? suite->threads : 1;
    options.timeout = 120;
    options.log = golden_log;
    suite->status = n ? loom_run_local(n, suite->walk, suite, &options) : loom_run_mpi(suite->walk, suite, &options);
    snprintf(suite->message, sizeof suite->message, "%s", suite->status ? loom_error_message() : "");
}

/* The test of one world. The ranks of a launcher have run before the tests began. */
static inline void golden_world(golden_suite *suite, int n) {
    if (n)
        golden_run(suite, n);
    const golden_counts *counts = &suite->counts;
    printf(
        "%s: %d cases ran, %d are not supported yet; layouts: %d ran, %d were refused for their query groups and ran "
        "with replicas, %d left out (%s)\n",
        suite->name, suite->cases, suite->unbuilt, counts->ran, counts->refused, counts->left_out, suite->left_out);
    if (suite->status)
        fail_msg("%s: %s", loom_status_name(suite->status), suite->message);
    assert_true(counts->ran > 0);
}

/* Without a launcher the tests run the worlds. Under one all processes walk together, then that of rank 0 alone runs
 * its tests and prints. */
static inline int golden_main(golden_suite *suite, const struct CMUnitTest *alone, size_t alone_count,
    const struct CMUnitTest *launched, size_t launched_count) {
    if (!loom_mpi_launched(NULL))
        return _cmocka_run_group_tests(suite->name, alone, alone_count, NULL, NULL);
    golden_run(suite, 0);
    if (!suite->is_first)
        return suite->status != LOOM_OK;
    return _cmocka_run_group_tests(suite->name, launched, launched_count, NULL, NULL);
}

static inline void golden_world_of_1(void **state) {
    golden_world(*state, 1);
}

static inline void golden_world_of_2(void **state) {
    golden_world(*state, 2);
}

static inline void golden_world_of_4(void **state) {
    golden_world(*state, 4);
}

static inline void golden_world_launched(void **state) {
    golden_world(*state, 0);
}

/* The whole of a program with one claim: the tests CLAIM_on_1_rank, …_on_2_ranks, …_on_4_ranks, …_on_launched_ranks. */
static inline int golden_claim(golden_suite *suite, const char *claim) {
    enum { WORLDS = 3 };
    const CMUnitTestFunction worlds[WORLDS + 1] = {
        golden_world_of_1, golden_world_of_2, golden_world_of_4, golden_world_launched};
    const char *const where[WORLDS + 1] = {"1_rank", "2_ranks", "4_ranks", "launched_ranks"};
    char names[WORLDS + 1][GOLDEN_TEXT];
    struct CMUnitTest tests[WORLDS + 1];
    for (int i = 0; i <= WORLDS; i++) {
        snprintf(names[i], sizeof names[i], "%s_on_%s", claim, where[i]);
        tests[i] = (struct CMUnitTest){.name = names[i], .test_func = worlds[i], .initial_state = suite};
    }
    return golden_main(suite, tests, WORLDS, tests + WORLDS, 1);
}

#endif
