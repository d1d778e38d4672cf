/* Import, then export, of Hugging Face's own models (hf/<case>): the same tensors under the same names, bit for bit, in
 * fp32 and bf16, in one file and in shards, and the same bytes of every file from every layout of the world. */
#include "model.h"
#include <dirent.h>
#include <ftw.h>

typedef struct export_case {
    char *name, *directory;
    loom_model_config config;
} export_case;

typedef struct export_suite {
    golden_suite golden;
    export_case *cases;
} export_suite;

static void load(export_suite *suite) {
    glob_t files = golden_glob("hf/*/case.json");
    suite->cases = golden_allocate(files.gl_pathc * sizeof *suite->cases);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        export_case c = {.name = golden_folder_name(files.gl_pathv[i])};
        c.directory = golden_path("hf/%s/model", c.name);
        if (golden_read_config(c.name, c.directory, &c.config)) {
            suite->cases[suite->golden.cases++] = c;
        } else {
            free(c.name);
            free(c.directory);
            suite->golden.unbuilt++;
        }
    }
    globfree(&files);
}

/* ---- files ---- */

static void output_path(const char *what, char path[GOLDEN_PATH]) {
    snprintf(path, GOLDEN_PATH, "%s/golden-export-%lld-%s", MEGALOOM_BUILD, (long long)getpid(), what);
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)found, (void)kind, (void)place;
    return remove(path);
}

static void remove_output(const char *path) {
    (void)nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* The bytes of a file, on the heap; NULL when it cannot be read. */
static char *read_bytes(const char *directory, const char *name, size_t *count) {
    char path[GOLDEN_PATH + 300];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    *count = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*count + 1);
    if (bytes && fread(bytes, 1, *count, file) != *count) {
        free(bytes);
        bytes = NULL;
    }
    fclose(file);
    return bytes;
}

static loom_status files_are_equal(const export_case *c, const char *wanted, const char *found) {
    DIR *handle = opendir(wanted);
    int count = 0;
    loom_status status = handle ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be read", wanted);
    for (struct dirent *entry; !status && (entry = readdir(handle));) {
        if (entry->d_name[0] == '.')
            continue;
        size_t a_count = 0, b_count = 0;
        char *a = read_bytes(wanted, entry->d_name, &a_count), *b = read_bytes(found, entry->d_name, &b_count);
        if (!a || !b || a_count != b_count || memcmp(a, b, a_count) != 0)
            status = loom_fail(LOOM_ERR_INTERNAL, "%s: %s of two layouts is not the same file", c->name, entry->d_name);
        free(a);
        free(b);
        count++;
    }
    if (handle)
        closedir(handle);
    return status || count >= 3 ? status : loom_fail(LOOM_ERR_INTERNAL, "%s: only %d files", wanted, count);
}

/* ---- tensors ---- */

static loom_status tensor_is_equal(
    const export_case *c, const loom_safetensors_tensor *wanted, const loom_safetensors *file, loom_dtype dtype) {
    const loom_safetensors_tensor *found;
    LOOM_TRY(loom_safetensors_find(file, wanted->name, &found));
    if (found->dtype != dtype || found->dims != wanted->dims ||
        memcmp(found->shape, wanted->shape, sizeof found->shape) != 0)
        return loom_fail(
            LOOM_ERR_INTERNAL, "%s: %s has another shape or dtype than the original", c->name, found->name);
    float *values = malloc((size_t)(wanted->elements + 1) * sizeof *values);
    if (!values)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    loom_status status = loom_safetensors_read_f32(wanted, 0, wanted->elements, values);
    for (int64_t i = 0; !status && i < wanted->elements; i++) {
        uint16_t narrow = loom_f32_to_bf16(values[i]);
        const void *expected = dtype == LOOM_F32 ? (const void *)&values[i] : (const void *)&narrow;
        size_t size = loom_dtype_size(dtype);
        if (memcmp((const char *)found->data + (size_t)i * size, expected, size) != 0)
            status =
                loom_fail(LOOM_ERR_INTERNAL, "%s: %s[%lld] is not the original's", c->name, found->name, (long long)i);
    }
    free(values);
    return status;
}

/* Exactly the original's tensors: so no padding row, no head where it is tied, one where it is not. */
static loom_status tensors_are_equal(const export_case *c, const char *directory, loom_dtype dtype) {
    loom_safetensors *wanted = NULL, *found = NULL;
    loom_status status = loom_safetensors_open(c->directory, &wanted);
    if (!status)
        status = loom_safetensors_open(directory, &found);
    int64_t count = status ? 0 : loom_safetensors_count(wanted);
    if (!status && loom_safetensors_count(found) != count)
        status = loom_fail(LOOM_ERR_INTERNAL, "%s: found %lld tensors, wanted %lld", c->name,
            (long long)loom_safetensors_count(found), (long long)count);
    for (int64_t i = 0; !status && i < count; i++)
        status = tensor_is_equal(c, loom_safetensors_get(wanted, i), found, dtype);
    bool tied = c->config.share_embeddings_and_output_weights;
    if (!status && loom_safetensors_has(found, "lm_head.weight") == tied)
        status = loom_fail(
            LOOM_ERR_INTERNAL, "%s: a head is written although it is tied, or not although it is its own", c->name);
    loom_safetensors_close(wanted);
    loom_safetensors_close(found);
    return status;
}

/* No shard of several tensors is larger than asked for. Opening has compared the index with the shards. */
static loom_status shards_are_small(const export_case *c, const char *directory, int64_t most) {
    loom_safetensors *file;
    LOOM_TRY(loom_safetensors_open(directory, &file));
    int64_t shards = 0, tensors = 0, bytes = 0;
    const char *path = NULL;
    loom_status status = LOOM_OK;
    for (int64_t i = 0; !status && i < loom_safetensors_count(file); i++) {
        const loom_safetensors_tensor *tensor = loom_safetensors_get(file, i);
        if (!path || strcmp(path, tensor->path) != 0) {
            path = tensor->path;
            tensors = bytes = 0;
            shards++;
        }
        tensors++;
        bytes += (int64_t)tensor->bytes;
        if (tensors > 1 && bytes > most)
            status = loom_fail(LOOM_ERR_INTERNAL, "%s: %s has more than %lld bytes", c->name, path, (long long)most);
    }
    loom_safetensors_close(file);
    if (!status && shards < 3)
        status = loom_fail(LOOM_ERR_INTERNAL, "%s: found %lld shards, wanted more", c->name, (long long)shards);
    return status;
}

/* A configuration as text, every field a line; the caller's: free. */
typedef struct config_text {
    char *text;
    size_t length;
} config_text;

static loom_status add_text(void *context, const char *text, size_t length) {
    config_text *to = context;
    char *grown = realloc(to->text, to->length + length + 1);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    memcpy(grown + to->length, text, length);
    to->text = grown;
    to->length += length;
    grown[to->length] = '\0';
    return LOOM_OK;
}

static loom_status print_config(const char *directory, config_text *made) {
    char hf[GOLDEN_PATH + 16];
    const char *overrides[] = {hf, "data.kind=mock", "steps=1", "optim.lr=1"};
    loom_run_config *config;
    snprintf(hf, sizeof hf, "model.hf=%s", directory);
    LOOM_TRY(loom_run_config_load(NULL, overrides, sizeof overrides / sizeof *overrides, &config));
    loom_status status = loom_run_config_print(config, add_text, made);
    loom_run_config_destroy(config);
    return status;
}

/* A size that the original's file leaves to be derived, as number; 0 = the line is none of them. */
static int64_t derived_size(const loom_model_config *config, const char *line) {
    static const char *const names[] = {
        "  # ffn_hidden_size: null\n", "  # num_query_groups: null\n", "  # kv_channels: null\n"};
    const int64_t sizes[] = {
        4 * config->hidden_size, config->num_attention_heads, config->hidden_size / config->num_attention_heads};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(line, names[i], strlen(names[i])) == 0)
            return sizes[i];
    return 0;
}

static bool line_is_equal(const export_case *c, const char *wanted, size_t a, const char *found, size_t b) {
    char derived[GOLDEN_TEXT];
    if (strncmp(wanted, "  hf: ", 6) == 0 && strncmp(found, "  hf: ", 6) == 0)
        return true; /* the directory's own name */
    int64_t size = derived_size(&c->config, wanted);
    if (size > 0 && strncmp(wanted, found, a < b ? a : b) != 0) {
        a = (size_t)snprintf(derived, sizeof derived, "%.*s%lld", (int)(a - strlen("null")), wanted, (long long)size);
        wanted = derived;
    }
    return a == b && memcmp(wanted, found, a) == 0;
}

static loom_status compare_configs(const export_case *c, const char *wanted, const char *found) {
    int lines = 0;
    for (; *wanted && *found; lines++) {
        size_t a = strcspn(wanted, "\n"), b = strcspn(found, "\n");
        if (!line_is_equal(c, wanted, a, found, b))
            return loom_fail(LOOM_ERR_INTERNAL, "%s: config.json reads back as \"%.*s\", the original as \"%.*s\"",
                c->name, (int)b, found, (int)a, wanted);
        wanted += a + (wanted[a] != '\0');
        found += b + (found[b] != '\0');
    }
    return !*wanted && !*found && lines > 40
               ? LOOM_OK
               : loom_fail(LOOM_ERR_INTERNAL, "%s: the configurations differ in length", c->name);
}

static loom_status config_is_equal(const export_case *c, const char *directory) {
    config_text wanted = {0}, found = {0};
    loom_status status = print_config(c->directory, &wanted);
    if (!status)
        status = print_config(directory, &found);
    if (!status)
        status = compare_configs(c, wanted.text, found.text);
    free(wanted.text);
    free(found.text);
    return status;
}

/* metadata.total_size is what loaders plan memory with: the bytes of all tensors, headers and file ends apart. */
static loom_status index_is_right(const export_case *c, const char *directory) {
    char path[GOLDEN_PATH + 40];
    loom_safetensors *file;
    LOOM_TRY(loom_safetensors_open(directory, &file));
    int64_t bytes = 0;
    for (int64_t i = 0; i < loom_safetensors_count(file); i++)
        bytes += (int64_t)loom_safetensors_get(file, i)->bytes;
    loom_safetensors_close(file);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    json_t *index = golden_json(path);
    int64_t found = json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size"));
    json_decref(index);
    return found == bytes ? LOOM_OK
                          : loom_fail(LOOM_ERR_INTERNAL, "%s: total_size of the index is %lld, the tensors have %lld",
                                c->name, (long long)found, (long long)bytes);
}

/* ---- one case ---- */

enum { SMALL_SHARD = 20000 };

/* As rank 0 looks at it. */
static loom_status check_outputs(const export_case *c, const char *whole, const char *shards, const char *narrow) {
    LOOM_TRY(tensors_are_equal(c, whole, LOOM_F32));
    LOOM_TRY(tensors_are_equal(c, shards, LOOM_F32));
    LOOM_TRY(tensors_are_equal(c, narrow, LOOM_BF16));
    LOOM_TRY(shards_are_small(c, shards, SMALL_SHARD));
    LOOM_TRY(index_is_right(c, shards));
    LOOM_TRY(config_is_equal(c, whole));
    return config_is_equal(c, narrow);
}

static loom_status save_all(
    golden_model *model, const export_case *c, const char *whole, const char *shards, const char *narrow) {
    loom_hf_save_options options = loom_hf_save_options_default();
    LOOM_TRY(loom_gpt_check_save_hf(model->parallel, whole, NULL));
    LOOM_TRY(loom_gpt_save_hf(model->parallel, whole, NULL));
    options.max_shard_bytes = SMALL_SHARD;
    options.source = c->directory;
    LOOM_TRY(loom_gpt_save_hf(model->parallel, shards, &options));
    options = loom_hf_save_options_default();
    options.dtype = LOOM_BF16;
    return loom_gpt_save_hf(model->parallel, narrow, &options);
}

static loom_status run_layout(loom_rank *rank, const export_case *c, const golden_layout *layout, bool first_layout) {
    char whole[GOLDEN_PATH], shards[GOLDEN_PATH], narrow[GOLDEN_PATH], reference[GOLDEN_PATH];
    golden_model model;
    output_path("whole", whole);
    output_path("shards", shards);
    output_path("narrow", narrow);
    output_path("reference", reference);
    loom_status status = golden_model_create(rank, layout, c->directory, &c->config, &model);
    if (!status)
        status = save_all(&model, c, whole, shards, narrow);
    /* The first layout of the case stays as what the others are compared with. */
    if (!status && first_layout)
        status = loom_gpt_save_hf(model.parallel, reference, NULL);
    golden_model_destroy(&model);
    if (!status && loom_rank_index(rank) == 0) {
        status = check_outputs(c, whole, shards, narrow);
        if (!status)
            status = files_are_equal(c, reference, whole);
    }
    return loom_agree(loom_rank_world(rank), status);
}

static loom_status run_case(export_suite *suite, loom_rank *rank, const export_case *c) {
    int world = loom_rank_count(rank);
    bool first = loom_rank_index(rank) == 0, first_layout = true;
    static const char *const outputs[] = {"whole", "shards", "narrow", "reference"};
    loom_status status = LOOM_OK;
    for (int tp = 1; !status && tp <= world; tp++) {
        golden_layout layout = {.tp = tp, .dp = world / tp, .micro = 1};
        if (world % tp)
            continue;
        if (!golden_layout_divides(&layout, &c->config, c->config.seq_length, world)) {
            if (first)
                suite->golden.counts.left_out++;
            continue;
        }
        layout.replicate = !golden_groups_divide(&c->config, tp);
        status = run_layout(rank, c, &layout, first_layout);
        first_layout = false;
        if (first)
            suite->golden.counts.ran++;
    }
    for (size_t i = 0; first && i < sizeof outputs / sizeof *outputs; i++) {
        char path[GOLDEN_PATH];
        output_path(outputs[i], path);
        remove_output(path);
    }
    return status;
}

static loom_status walk(loom_rank *rank, void *argument) {
    export_suite *suite = argument;
    golden_begin(&suite->golden, rank);
    for (int i = 0; i < suite->golden.cases; i++)
        LOOM_TRY(run_case(suite, rank, &suite->cases[i]));
    return LOOM_OK;
}

/* ---- what is refused, on every rank ---- */

/* The rank that writes has the reason, the others its message. */
static loom_status must_refuse(const golden_model *model, const char *directory, const loom_hf_save_options *options,
    loom_status wanted, const char *because) {
    loom_status status = loom_gpt_save_hf(model->parallel, directory, options);
    bool writes = loom_rank_index(loom_fabric_rank(model->fabric)) == 0;
    if (status == (writes ? wanted : LOOM_ERR_ABORTED) && strstr(loom_error_message(), because))
        return LOOM_OK;
    char found[GOLDEN_MESSAGE];
    snprintf(found, sizeof found, "%s", loom_error_message());
    return loom_fail(LOOM_ERR_INTERNAL, "found %s \"%s\", expected \"%s\"", loom_status_name(status), found, because);
}

static loom_status copy_file(const char *from, const char *to, const char *name) {
    char path[GOLDEN_PATH + 300];
    size_t count = 0;
    char *bytes = read_bytes(from, name, &count);
    snprintf(path, sizeof path, "%s/%s", to, name);
    FILE *file = bytes ? fopen(path, "wb") : NULL;
    bool whole = file && fwrite(bytes, 1, count, file) == count;
    if (file)
        whole = fclose(file) == 0 && whole;
    free(bytes);
    return whole ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be copied", path);
}

/* A model of transformers; a copy, so that an export that is not refused does not destroy the case. */
static loom_status refuse_to_replace(loom_rank *rank, const golden_model *model, const char *directory) {
    char path[GOLDEN_PATH];
    loom_hf_save_options options = loom_hf_save_options_default();
    output_path("theirs", path);
    loom_status status = LOOM_OK;
    if (loom_rank_index(rank) == 0) {
        status = mkdir(path, 0777) == 0 ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be made", path);
        if (!status)
            status = copy_file(directory, path, "config.json");
        if (!status)
            status = copy_file(directory, path, "model.safetensors");
    }
    status = loom_agree(loom_rank_world(rank), status);
    if (!status)
        status = must_refuse(model, path, &options, LOOM_ERR_ARGUMENT, "did not write");
    status = loom_agree(loom_rank_world(rank), status);
    if (loom_rank_index(rank) == 0)
        remove_output(path);
    return status;
}

static loom_status refuse(loom_rank *rank, void *argument) {
    const export_suite *suite = argument;
    const export_case *c = &suite->cases[0];
    while (c->config.num_query_groups % 2) /* two tensor ranks share its groups; gpt2 is such a case */
        c++;
    golden_layout layout = {.tp = 2, .dp = 1, .micro = 1};
    golden_model model;
    char path[GOLDEN_PATH];
    output_path("refused", path);
    loom_hf_save_options options = loom_hf_save_options_default(), plain = options;
    LOOM_TRY(golden_model_create(rank, &layout, c->directory, &c->config, &model));
    loom_status status = refuse_to_replace(rank, &model, c->directory);
    options.dtype = LOOM_I8;
    if (!status)
        status = must_refuse(&model, path, &options, LOOM_ERR_ARGUMENT, "found I8");
    options = plain;
    options.max_shard_bytes = 0;
    if (!status)
        status = must_refuse(&model, path, &options, LOOM_ERR_ARGUMENT, "max_shard_bytes");
    options = plain;
    options.tokenizer = "words";
    if (!status)
        status = must_refuse(&model, path, &options, LOOM_ERR_UNSUPPORTED, "'words'");
    char *tokenizer = golden_path("tokenizer/llama3");
    options.tokenizer = tokenizer;
    if (!status && access(tokenizer, F_OK) == 0)
        status = must_refuse(&model, path, &options, LOOM_ERR_ARGUMENT, "has 563 tokens, the model a vocabulary of");
    free(tokenizer);
    /* A weight that fp16 cannot hold ends the export on both ranks, and nothing stays. */
    loom_parameter *const *parameters;
    int64_t count;
    options = plain;
    options.dtype = LOOM_F16;
    if (!status)
        status = loom_parallel_parameters(model.parallel, &parameters, &count);
    if (!status) {
        parameters[0]->data[3] = 1e6f;
        status = must_refuse(&model, path, &options, LOOM_ERR_FORMAT, "65504");
        parameters[0]->data[3] = NAN;
    }
    static const loom_dtype dtypes[] = {LOOM_F32, LOOM_BF16, LOOM_F16};
    for (size_t i = 0; !status && i < sizeof dtypes / sizeof *dtypes; i++) {
        options.dtype = dtypes[i];
        status = must_refuse(&model, path, &options, LOOM_ERR_NUMERIC, "element 3 is not a number");
    }
    golden_model_destroy(&model);
    strcat(path, ".tmp");
    if (!status && loom_rank_index(rank) == 0 && access(path, F_OK) == 0)
        status = loom_fail(LOOM_ERR_INTERNAL, "%s is left", path);
    return status;
}

/* ---- the tests ---- */

static void one_rank_gives_back_what_it_read(void **state) {
    golden_world(*state, 1);
}

static void two_ranks_give_back_what_they_read(void **state) {
    golden_world(*state, 2);
}

static void four_ranks_give_back_what_they_read(void **state) {
    golden_world(*state, 4);
}

static void what_cannot_be_written_is_refused_on_every_rank(void **state) {
    loom_run_options options = loom_run_options_default();
    options.timeout = 120;
    options.threads = 1;
    if (loom_run_local(2, refuse, *state, &options))
        fail_msg("%s", loom_error_message());
}

static void launched_ranks_give_back_what_they_read(void **state) {
    golden_world(*state, 0);
}

int main(void) {
    export_suite suite = {.golden = {.name = "golden.export", .left_out = "heads do not divide", .walk = walk}};
    const struct CMUnitTest alone[] = {
        cmocka_unit_test_prestate(one_rank_gives_back_what_it_read, &suite),
        cmocka_unit_test_prestate(two_ranks_give_back_what_they_read, &suite),
        cmocka_unit_test_prestate(four_ranks_give_back_what_they_read, &suite),
        cmocka_unit_test_prestate(what_cannot_be_written_is_refused_on_every_rank, &suite),
    };
    const struct CMUnitTest launched[] = {cmocka_unit_test_prestate(launched_ranks_give_back_what_they_read, &suite)};
    load(&suite);
    int failed = golden_main(&suite.golden, alone, sizeof alone / sizeof *alone, launched, 1);
    for (int i = 0; i < suite.golden.cases; i++) {
        free(suite.cases[i].name);
        free(suite.cases[i].directory);
    }
    free(suite.cases);
    return failed;
}
