/* A model on several stages goes in and out as one on a single rank does: the same tensors, in the same order, with the
 * same bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/random.h"
#include "model/gpt.h"
#include <dirent.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { SEED = 41, LAYERS = 4, STAGES_MAX = 4, PATH_BYTES = 320, FOLDER_BYTES = 256 };

/* ---- models and cuts ---- */

static loom_model_config config_of(bool tied, int64_t layers) {
    return (loom_model_config){.architecture = tied ? "gpt2" : "llama",
        .num_layers = layers,
        .hidden_size = 24,
        .ffn_hidden_size = 36,
        .num_attention_heads = 4,
        .num_query_groups = tied ? 4 : 2,
        .seq_length = 8,
        .max_position_embeddings = 16,
        .vocab_size = 29,
        .make_vocab_size_divisible_by = 4,
        .normalization = tied ? LOOM_LAYERNORM : LOOM_RMSNORM,
        .layernorm_epsilon = 1e-5,
        .activation = tied ? LOOM_GELU_TANH : LOOM_SWIGLU,
        .position_embedding_type = tied ? LOOM_POSITION_LEARNED : LOOM_POSITION_ROPE,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = tied,
        .add_qkv_bias = tied,
        .share_embeddings_and_output_weights = tied,
        .init_method_std = 0.2,
        .use_scaled_init = true};
}

/* Chunk c of stage r is chunks[c * stages + r]; stages 1 and each 0 = not cut. */
typedef struct cut {
    int stages, each;
    loom_stage chunks[2 * STAGES_MAX];
} cut;

static const cut uncut = {1, 0, {{0}}};
static const cut cuts[] = {
    {2, 1, {{0, 3, true, false}, {3, 1, false, true}}},
    {3, 1, {{0, 1, true, false}, {1, 1, false, false}, {2, 2, false, true}}},
    {2, 2, {{0, 0, true, false}, {0, 2, false, false}, {2, 2, false, false}, {4, 0, false, true}}},
    {3, 1, {{0, 0, true, false}, {0, 4, false, false}, {4, 0, false, true}}},
};

/* One rank's place and model. Tensor ranks are next to each other. */
typedef struct member {
    loom_comm *tp, *pp;
    loom_module *module;
    loom__gpt *gpt;
} member;

static loom_status make_groups(loom_rank *rank, int stages, member *m) {
    int tp = loom_rank_count(rank) / stages, me = loom_rank_index(rank), ranks[2 * STAGES_MAX];
    for (int i = 0; i < tp; i++)
        ranks[i] = me / tp * tp + i;
    LOOM_TRY(loom_group_create(rank, "tp", ranks, tp, &m->tp));
    for (int i = 0; i < stages; i++)
        ranks[i] = i * tp + me % tp;
    return loom_group_create(rank, "pp", ranks, stages, &m->pp);
}

static loom_status make_model(
    loom_rank *rank, const loom_model_config *config, const cut *c, const char *directory, member *m) {
    loom_stage chunks[2];
    int stage = m->pp ? loom_comm_rank(m->pp) : 0;
    for (int i = 0; i < c->each; i++)
        chunks[i] = c->chunks[i * c->stages + stage];
    loom_module_environment environment = {.rank = rank,
        .tensor_group = m->tp ? m->tp : loom_rank_world(rank),
        .seed = SEED,
        .perform_initialization = true,
        .stage = stage,
        .stages = c->stages,
        .chunk_count = c->each ? c->each : 1,
        .chunks = c->each ? chunks : NULL,
        .pipeline_group = m->pp};
    LOOM_TRY(loom__gpt_create(config, directory, true, &m->module));
    m->gpt = m->module->context;
    return m->module->materialize(m->gpt, &environment);
}

static void member_destroy(member *m) {
    if (m->module)
        m->module->destroy(m->module->context);
    loom_group_destroy(m->pp);
    loom_group_destroy(m->tp);
}

/* ---- a trial ---- */

typedef struct trial {
    bool tied;
    const cut *cut;
    const char *source;    /* NULL: initial weights */
    char path[PATH_BYTES]; /* the directory written, and with ".gradients" behind it a file of gradients */
    uint64_t seen;         /* expected of a visit; set by the run of one rank */
} trial;

static loom_status see(void *context, int64_t number, const float *canonical) {
    member *m = ((void **)context)[0];
    uint64_t *hash = ((void **)context)[1];
    const loom__parameter_descriptor *descriptor = &m->gpt->spec->parameters[number];
    *hash = loom__hash_bytes(*hash, &number, sizeof number);
    *hash = loom__hash_bytes(*hash, canonical, (size_t)loom__descriptor_count(descriptor) * sizeof *canonical);
    return LOOM_OK;
}

/* Gradients that are a function of the values, so that every cut has the same; those of copies must not be seen. */
static loom_status make_gradients(loom__parameter_set *set) {
    for (int64_t i = 0; i < set->count; i++) {
        loom_parameter *p = set->list[i];
        bool copy = p->shared_ends && strcmp(p->name, "output_layer.weight") == 0;
        p->grad = malloc((size_t)(loom_parameter_count(p) + 1) * sizeof(float));
        CHECK(p->grad, "out of memory");
        for (int64_t e = 0; e < loom_parameter_count(p); e++) {
            p->grad[e] = copy ? NAN : p->data[e] * 3 + 1;
            if (copy)
                p->data[e] = NAN;
        }
    }
    return LOOM_OK;
}

static void free_gradients(loom__parameter_set *set) {
    for (int64_t i = 0; set && i < set->count; i++)
        free(set->list[i]->grad);
}

static loom_status write_gradients(const trial *t, const member *m, bool writes) {
    char path[PATH_BYTES + 16];
    loom_safetensors_writer *writer = NULL;
    loom_status status = LOOM_OK;
    snprintf(path, sizeof path, "%s.gradients", t->path);
    if (writes)
        status = loom_safetensors_writer_create(path, &writer);
    if (!status && writes)
        status = loom__hf_describe(m->gpt->set, writer);
    if (!status)
        status = loom__hf_write(m->gpt->set, LOOM__PARAMETER_GRAD, m->tp, m->pp, 0.5f, writer);
    if (!status && writes)
        status = loom_safetensors_writer_finish(writer);
    loom_safetensors_writer_destroy(writer);
    return status;
}

static loom_status pass_through(loom_rank *rank, trial *t, member *m) {
    loom_model_config config = config_of(t->tied, LAYERS);
    loom_hf_save_options options = loom_hf_save_options_default();
    bool writes = loom_rank_index(rank) == 0;
    uint64_t hash = LOOM__HASH_BEGIN;
    options.max_shard_bytes = 20000;
    LOOM_TRY(make_groups(rank, t->cut->stages, m));
    LOOM_TRY(make_model(rank, &config, t->cut, t->source, m));
    LOOM_TRY(make_gradients(m->gpt->set));
    LOOM_TRY(loom__hf_save(m->gpt->set, m->tp, m->pp, loom_rank_world(rank), writes, t->path, &options, NULL));
    LOOM_TRY(write_gradients(t, m, writes));
    LOOM_TRY(loom__parameter_set_visit(m->gpt->set, LOOM__PARAMETER_DATA, m->tp, m->pp, 1, see, (void *[]){m, &hash}));
    if (t->cut == &uncut)
        t->seen = hash;
    CHECK(hash == t->seen, "other tensors are seen than by one rank");
    return LOOM_OK;
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    member m = {0};
    loom_status status = pass_through(rank, argument, &m);
    if (m.gpt)
        free_gradients(m.gpt->set);
    member_destroy(&m);
    return status;
}

static loom_status run(int ranks, loom_rank_function function, void *argument) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    return loom_run_local(ranks, function, argument, &options);
}

static void must_run(int ranks, loom_rank_function function, void *argument) {
    if (run(ranks, function, argument))
        fail_msg("%d ranks: %s", ranks, loom_error_message());
}

/* ---- files ---- */

static int make_folder(void **state) {
    char *folder = malloc(FOLDER_BYTES);
    snprintf(folder, FOLDER_BYTES, "%s/stages-XXXXXX", MEGALOOM_BUILD);
    *state = folder;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)found, (void)kind, (void)place;
    return remove(path);
}

static int remove_folder(void **state) {
    int failed = nftw(*state, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return failed;
}

static char *read_file(const char *path, long *length) {
    FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("%s cannot be opened", path);
    fseek(file, 0, SEEK_END);
    *length = ftell(file);
    rewind(file);
    char *bytes = malloc((size_t)*length + 1);
    assert_int_equal(fread(bytes, 1, (size_t)*length, file), *length);
    fclose(file);
    return bytes;
}

static void assert_same_file(const char *a, const char *b) {
    long a_length, b_length;
    char *a_bytes = read_file(a, &a_length), *b_bytes = read_file(b, &b_length);
    if (a_length != b_length || memcmp(a_bytes, b_bytes, (size_t)a_length) != 0)
        fail_msg("%s and %s differ", a, b);
    free(a_bytes);
    free(b_bytes);
}

/* Both have the same files; returns their number. */
static int assert_same_directory(const char *a, const char *b) {
    char a_path[2 * PATH_BYTES], b_path[2 * PATH_BYTES];
    int files = 0, others = 0;
    DIR *directory = opendir(a);
    assert_non_null(directory);
    for (const struct dirent *entry; (entry = readdir(directory));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(a_path, sizeof a_path, "%s/%s", a, entry->d_name);
        snprintf(b_path, sizeof b_path, "%s/%s", b, entry->d_name);
        assert_same_file(a_path, b_path);
        files++;
    }
    closedir(directory);
    directory = opendir(b);
    assert_non_null(directory);
    for (const struct dirent *entry; (entry = readdir(directory));)
        others += entry->d_name[0] != '.';
    closedir(directory);
    assert_int_equal(files, others);
    return files;
}

/* ---- the claims ---- */

static void compare_stages(const char *folder, bool tied) {
    trial one = {.tied = tied, .cut = &uncut};
    snprintf(one.path, sizeof one.path, "%s/one", folder);
    must_run(1, on_rank, &one);
    char one_gradients[PATH_BYTES + 16], gradients[PATH_BYTES + 16];
    snprintf(one_gradients, sizeof one_gradients, "%s.gradients", one.path);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        for (int tp = 1; tp <= 2; tp++)
            for (int loads = 0; loads < 2; loads++) {
                trial t = {.tied = tied, .cut = &cuts[i], .source = loads ? one.path : NULL, .seen = one.seen};
                snprintf(t.path, sizeof t.path, "%s/%zu-%d-%d", folder, i, tp, loads);
                snprintf(gradients, sizeof gradients, "%s.gradients", t.path);
                must_run(cuts[i].stages * tp, on_rank, &t);
                assert_true(assert_same_directory(one.path, t.path) > 4); /* several shards */
                assert_same_file(one_gradients, gradients);
            }
}

static void tied_weights_of_stages_are_written_as_one_rank_writes_them(void **state) {
    compare_stages(*state, true);
}

static void untied_weights_of_stages_are_written_as_one_rank_writes_them(void **state) {
    compare_stages(*state, false);
}

/* ---- what is refused ---- */

static loom_status write_layers(loom_rank *rank, const char *path, int64_t layers) {
    loom_model_config config = config_of(true, layers);
    loom_hf_save_options options = loom_hf_save_options_default();
    member m = {0};
    loom_status status = make_model(rank, &config, &uncut, NULL, &m);
    if (!status)
        status = loom__hf_save(m.gpt->set, NULL, NULL, loom_rank_world(rank), true, path, &options, NULL);
    member_destroy(&m);
    return status;
}

/* The first stage, which needs layers 0 to 2 alone. */
static loom_status read_first_stage(loom_rank *rank, const char *path) {
    loom_model_config config = config_of(true, LAYERS);
    member m = {0};
    loom_status status = make_model(rank, &config, &cuts[0], path, &m);
    member_destroy(&m);
    return status;
}

static loom_status other_layers(loom_rank *rank, void *folder) {
    static const struct {
        int64_t layers;
        const char *text;
    } wrong[] = {{LAYERS - 1, "h.3."}, {LAYERS + 1, "transformer.h.4.ln_1.weight has no place in this model"}};
    for (int i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        snprintf(path, sizeof path, "%s/%d", (const char *)folder, i);
        LOOM_TRY(write_layers(rank, path, wrong[i].layers));
        loom_status status = read_first_stage(rank, path);
        CHECK(status && strstr(loom_error_message(), wrong[i].text), "%lld layers: found \"%s\", expected \"%s\"",
            (long long)wrong[i].layers, status ? loom_error_message() : "", wrong[i].text);
        loom_error_clear();
    }
    return LOOM_OK;
}

static void a_directory_that_another_stage_cannot_read_is_refused_by_this_one(void **state) {
    must_run(1, other_layers, *state);
}

static loom_status ignore(void *context, int64_t number, const float *canonical) {
    (void)context, (void)number, (void)canonical;
    return LOOM_OK;
}

static loom_status with_a_hole(loom_rank *rank, void *argument) {
    static const cut hole = {2, 1, {{0, 1, true, false}, {2, 2, false, true}}};
    static const cut overlap = {2, 1, {{0, 3, true, false}, {2, 2, false, true}}};
    bool twice = *(const bool *)argument;
    loom_model_config config = config_of(true, LAYERS);
    member m = {0};
    loom_status status = make_groups(rank, 2, &m);
    if (!status)
        status = make_model(rank, &config, twice ? &overlap : &hole, NULL, &m);
    if (!status)
        status = loom__parameter_set_visit(m.gpt->set, LOOM__PARAMETER_DATA, m.tp, m.pp, 1, ignore, NULL);
    member_destroy(&m);
    return status;
}

static void a_layer_on_no_stage_or_on_two_is_named(void **state) {
    (void)state;
    bool twice = false;
    assert_int_equal(run(2, with_a_hole, &twice), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "decoder.layers.1.input_layernorm.weight is held by 0 stages"));
    twice = true;
    assert_int_equal(run(2, with_a_hole, &twice), LOOM_ERR_STATE);
    assert_non_null(strstr(loom_error_message(), "decoder.layers.2.input_layernorm.weight is held by 2 stages"));
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FOLDER(tied_weights_of_stages_are_written_as_one_rank_writes_them),
        WITH_FOLDER(untied_weights_of_stages_are_written_as_one_rank_writes_them),
        WITH_FOLDER(a_directory_that_another_stage_cannot_read_is_refused_by_this_one),
        cmocka_unit_test(a_layer_on_no_stage_or_on_two_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
