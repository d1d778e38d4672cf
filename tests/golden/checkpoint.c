/* Checkpoints that Megatron-Core and PyTorch wrote (ckpt/<case>): every tensor, object and common state of each is what
 * the manifest beside it says, element for element. */
#include "checkpoint/writer.h"
#include "support/golden.h"
#include "support/sha256.h"
#include <megaloom/megaloom.h>
#include <setjmp.h>
#include <sys/stat.h>

#include <cmocka.h>

static glob_t cases;

static char *case_folder(size_t index, char *path, size_t bytes) {
    struct stat status;
    char dcp[4200];
    snprintf(path, bytes, "%s", cases.gl_pathv[index]);
    *strrchr(path, '/') = '\0';
    snprintf(dcp, sizeof dcp, "%s/dcp", path);
    if (stat(dcp, &status) == 0)
        strcat(path, "/dcp");
    return path;
}

static loom_checkpoint *open_case(size_t index) {
    char path[4096];
    loom_checkpoint *checkpoint = NULL;
    if (loom_checkpoint_open(case_folder(index, path, sizeof path), &checkpoint))
        fail_msg("%s", loom_error_message());
    return checkpoint;
}

static void check_list(const json_t *list, int count, const int64_t *found) {
    assert_int_equal(json_array_size(list), count);
    for (int i = 0; i < count; i++)
        assert_int_equal(json_integer_value(json_array_get(list, (size_t)i)), found[i]);
}

static loom_dtype dtype_of(const char *name) {
    static const struct {
        const char *name;
        loom_dtype dtype;
    } names[] = {{"float32", LOOM_F32}, {"bfloat16", LOOM_BF16}, {"float16", LOOM_F16}, {"float64", LOOM_F64},
        {"int64", LOOM_I64}, {"bool", LOOM_BOOL}, {"uint8", LOOM_U8}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0)
            return names[i].dtype;
    fail_msg("the manifest has dtype %s", name);
    return LOOM_DTYPE_COUNT;
}

static void check_digest(const char *name, const json_t *digest, const void *data, size_t bytes) {
    char found[65];
    sha256(data, bytes, found);
    if (strcmp(found, json_string_value(digest)) != 0)
        fail_msg("%s: %zu bytes have the digest %s, expected %s", name, bytes, found, json_string_value(digest));
}

static bool is_floating(loom_dtype dtype) {
    return dtype == LOOM_F64 || dtype == LOOM_F32 || dtype == LOOM_F16 || dtype == LOOM_BF16;
}

static void check_tensor(const loom_checkpoint *from, const char *name, const json_t *wanted) {
    static const int64_t zeros[LOOM_CHECKPOINT_MAX_DIMS];
    const loom_checkpoint_tensor *tensor = NULL;
    if (loom_checkpoint_find_tensor(from, name, &tensor))
        fail_msg("%s", loom_error_message());
    check_list(json_object_get(wanted, "shape"), tensor->dims, tensor->shape);
    assert_int_equal(tensor->dtype, dtype_of(golden_string(wanted, "dtype", "")));
    const json_t *chunks = json_object_get(wanted, "chunks");
    assert_int_equal(json_array_size(chunks), tensor->chunk_count);
    for (int64_t i = 0; i < tensor->chunk_count; i++) {
        const json_t *chunk = json_array_get(chunks, (size_t)i);
        check_list(json_array_get(chunk, 0), tensor->dims, tensor->chunks[i].offsets);
        check_list(json_array_get(chunk, 1), tensor->dims, tensor->chunks[i].sizes);
    }
    size_t count = (size_t)tensor->elements;
    void *data = malloc(count * 8 + 1);
    assert_non_null(data);
    if (loom_checkpoint_read(from, tensor, zeros, tensor->shape, tensor->dtype, data))
        fail_msg("%s", loom_error_message());
    check_digest(name, json_object_get(wanted, "sha256_native"), data, count * loom_dtype_size(tensor->dtype));
    if (is_floating(tensor->dtype)) {
        if (loom_checkpoint_read(from, tensor, zeros, tensor->shape, LOOM_F32, data))
            fail_msg("%s", loom_error_message());
        check_digest(name, json_object_get(wanted, "sha256_f32"), data, count * sizeof(float));
    }
    const json_t *original = json_object_get(wanted, "orig_shape");
    assert_int_equal(original != NULL, tensor->original_dims > 0);
    if (original) {
        check_list(original, tensor->original_dims, tensor->original_shape);
        if (loom_checkpoint_read_original(from, tensor, zeros, tensor->original_shape, LOOM_F32, data))
            fail_msg("%s", loom_error_message());
        check_digest(name, json_object_get(wanted, "sha256_f32_orig"), data, count * sizeof(float));
    }
    free(data);
}

static void every_tensor_is_what_the_manifest_says(void **state) {
    (void)state;
    int64_t tensors = 0;
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        json_t *manifest = golden_json(cases.gl_pathv[i]), *wanted = json_object_get(manifest, "tensors"), *entry;
        const char *name;
        loom_checkpoint *checkpoint = open_case(i);
        assert_int_equal(loom_checkpoint_get_info(checkpoint)->tensors, json_object_size(wanted));
        json_object_foreach(wanted, name, entry) check_tensor(checkpoint, name, entry);
        tensors += loom_checkpoint_get_info(checkpoint)->tensors;
        loom_checkpoint_close(checkpoint);
        json_decref(manifest);
    }
    printf("%zu checkpoints, %lld tensors, 0 left out\n", cases.gl_pathc, (long long)tensors);
    assert_true(cases.gl_pathc > 0);
}

/* The same JSON, but for what the manifest keeps as a digest (large tensors, arrays, long tuples). */
static bool is_same(const json_t *wanted, const json_t *found) {
    const char *key;
    json_t *value;
    if (json_is_number(wanted) && json_is_number(found))
        return json_number_value(wanted) == json_number_value(found);
    if (json_is_object(wanted) && json_object_get(wanted, "__ndarray__"))
        return strstr(golden_string(found, "__object__", ""), "multiarray._reconstruct") != NULL;
    if (json_is_object(wanted) && json_is_object(found)) {
        json_object_foreach((json_t *)(uintptr_t)wanted, key, value) {
            bool digest = strncmp(key, "sha256", 6) == 0;
            if (!digest && !is_same(value, json_object_get(found, key)))
                return false;
        }
        json_object_foreach((json_t *)(uintptr_t)found, key, value) {
            (void)value;
            if (!json_object_get(wanted, key))
                return false;
        }
        return true;
    }
    if (json_is_array(wanted) && json_is_array(found)) {
        if (json_array_size(wanted) != json_array_size(found))
            return false;
        for (size_t i = 0; i < json_array_size(wanted); i++)
            if (!is_same(json_array_get(wanted, i), json_array_get(found, i)))
                return false;
        return true;
    }
    return json_equal(wanted, found) != 0;
}

static void check_value(const char *name, const json_t *wanted, const loom_value *value) {
    char *text = NULL;
    if (loom_value_to_json(value, 0, &text))
        fail_msg("%s", loom_error_message());
    json_t *found = json_loads(text, JSON_DECODE_ANY, NULL);
    if (!is_same(wanted, found))
        fail_msg("%s is %.2000s, expected %.2000s", name, text, json_dumps(wanted, JSON_ENCODE_ANY));
    json_decref(found);
    free(text);
}

static void every_object_is_what_the_manifest_says(void **state) {
    (void)state;
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        json_t *manifest = golden_json(cases.gl_pathv[i]), *wanted = json_object_get(manifest, "objects"), *entry;
        const char *name;
        loom_checkpoint *checkpoint = open_case(i);
        assert_int_equal(loom_checkpoint_get_info(checkpoint)->objects, json_object_size(wanted));
        json_object_foreach(wanted, name, entry) {
            const loom_checkpoint_object *object = NULL;
            const loom_value *value = NULL;
            loom_value_pool *pool = NULL;
            assert_int_equal(loom_value_pool_create(&pool), LOOM_OK);
            if (loom_checkpoint_find_object(checkpoint, name, &object) ||
                loom_checkpoint_read_object(checkpoint, object, pool, &value))
                fail_msg("%s", loom_error_message());
            assert_int_equal(object->bytes, golden_int(entry, "bytes", -1));
            check_value(name, json_object_get(entry, "value"), value);
            loom_value_pool_destroy(pool);
        }
        loom_checkpoint_close(checkpoint);
        json_decref(manifest);
    }
}

static void every_common_state_is_what_torch_reads(void **state) {
    (void)state;
    size_t compared = 0;
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        char path[4200];
        loom_checkpoint *checkpoint = open_case(i);
        const loom_value *common = loom_checkpoint_get_info(checkpoint)->common;
        snprintf(path, sizeof path, "%.*s/common.json", (int)(strrchr(cases.gl_pathv[i], '/') - cases.gl_pathv[i]),
            cases.gl_pathv[i]);
        struct stat status;
        assert_int_equal(common != NULL, stat(path, &status) == 0);
        if (common) {
            json_t *wanted = golden_json(path);
            check_value(path, wanted, common);
            json_decref(wanted);
            compared++;
        }
        loom_checkpoint_close(checkpoint);
    }
    assert_true(compared > 0);
}

/* Boxes that begin and end inside of chunks, of one element and of none, against the whole. */
static void any_box_is_a_part_of_the_whole(void **state) {
    static const int64_t zeros[LOOM_CHECKPOINT_MAX_DIMS];
    (void)state;
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        loom_checkpoint *checkpoint = open_case(i);
        for (int64_t t = 0; t < loom_checkpoint_get_info(checkpoint)->tensors; t++) {
            const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(checkpoint, t);
            bool original = tensor->original_dims > 0;
            int dims = original ? tensor->original_dims : tensor->dims;
            const int64_t *shape = original ? tensor->original_shape : tensor->shape;
            loom_status (*read)(const loom_checkpoint *, const loom_checkpoint_tensor *, const int64_t *,
                const int64_t *, loom_dtype, void *) = original ? loom_checkpoint_read_original : loom_checkpoint_read;
            size_t size = loom_dtype_size(tensor->dtype);
            unsigned char *whole = malloc((size_t)tensor->elements * size + 1),
                          *part = malloc((size_t)tensor->elements * size + 1);
            assert_int_equal(read(checkpoint, tensor, zeros, shape, tensor->dtype, whole), LOOM_OK);
            for (int turn = 0; turn < 4; turn++) {
                int64_t offsets[LOOM_CHECKPOINT_MAX_DIMS] = {0}, sizes[LOOM_CHECKPOINT_MAX_DIMS] = {0}, count = 1;
                for (int d = 0; d < dims; d++) {
                    offsets[d] = turn == 0 ? shape[d] / 3 : turn == 1 ? shape[d] - 1 : turn == 2 ? 0 : shape[d] / 2;
                    sizes[d] = turn == 0 ? (shape[d] + 1) / 2 : turn == 3 && d == dims - 1 ? 0 : 1;
                    if (sizes[d] > shape[d] - offsets[d])
                        sizes[d] = shape[d] - offsets[d];
                    count *= sizes[d];
                }
                assert_int_equal(read(checkpoint, tensor, offsets, sizes, tensor->dtype, part), LOOM_OK);
                for (int64_t e = 0; e < count; e++) {
                    int64_t rest = e, at = 0, stride = 1;
                    for (int d = dims - 1; d >= 0; d--) {
                        at += (offsets[d] + rest % sizes[d]) * stride;
                        rest /= sizes[d];
                        stride *= shape[d];
                    }
                    assert_memory_equal(part + (size_t)e * size, whole + (size_t)at * size, size);
                }
            }
            free(whole);
            free(part);
        }
        loom_checkpoint_close(checkpoint);
    }
}

/* ---- writing ---- */

enum { WRITERS = 3 };

static void must(loom_status status) {
    if (status)
        fail_msg("%s", loom_error_message());
}

/* Chunks go to the files of several ranks in turn, objects to that of rank 0. */
static void rewrite(const loom_checkpoint *from, const char *path) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(from);
    loom__checkpoint_writer *writers[WRITERS] = {0};
    loom__checkpoint_description descriptions[WRITERS] = {0};
    loom_value_pool *pool = NULL;
    loom_value *empty = NULL;
    must(loom_value_pool_create(&pool));
    must(loom_value_dict(pool, &empty));
    must(loom__checkpoint_begin(path));
    for (int w = 0; w < WRITERS; w++)
        must(loom__checkpoint_file_create(path, w, w % 2, &writers[w]));
    for (int64_t i = 0; i < info->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(from, i);
        const loom_value *value = NULL;
        must(loom_checkpoint_read_object(from, object, pool, &value));
        must(loom__checkpoint_file_object(writers[0], object->name, value));
    }
    for (int64_t i = 0; i < info->tensors; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(from, i);
        void *data = malloc((size_t)tensor->elements * 8 + 1);
        assert_non_null(data);
        for (int64_t c = 0; c < tensor->chunk_count; c++) {
            const loom_checkpoint_chunk *chunk = &tensor->chunks[c];
            must(loom_checkpoint_read(from, tensor, chunk->offsets, chunk->sizes, tensor->dtype, data));
            must(loom__checkpoint_file_tensor(writers[(i + c) % WRITERS], tensor->name, tensor->dtype, tensor->dims,
                tensor->shape, chunk->offsets, chunk->sizes, data));
        }
        free(data);
    }
    for (int w = 0; w < WRITERS; w++)
        must(loom__checkpoint_file_finish(writers[w], &descriptions[w]));
    must(loom__checkpoint_commit(path, descriptions, WRITERS, info->common ? info->common : empty));
    for (int w = 0; w < WRITERS; w++) {
        loom__checkpoint_writer_destroy(writers[w]);
        free(descriptions[w].data);
    }
    loom_value_pool_destroy(pool);
}

static void check_same_tensors(const loom_checkpoint *a, const loom_checkpoint *b) {
    static const int64_t zeros[LOOM_CHECKPOINT_MAX_DIMS];
    assert_int_equal(loom_checkpoint_get_info(a)->tensors, loom_checkpoint_get_info(b)->tensors);
    for (int64_t i = 0; i < loom_checkpoint_get_info(a)->tensors; i++) {
        const loom_checkpoint_tensor *x = loom_checkpoint_tensor_at(a, i), *y = loom_checkpoint_tensor_at(b, i);
        assert_string_equal(x->name, y->name);
        assert_int_equal(x->dtype, y->dtype);
        assert_int_equal(x->dims, y->dims);
        assert_memory_equal(x->shape, y->shape, sizeof x->shape);
        assert_int_equal(x->chunk_count, y->chunk_count);
        size_t bytes = (size_t)x->elements * loom_dtype_size(x->dtype);
        char *one = malloc(bytes + 1), *two = malloc(bytes + 1);
        must(loom_checkpoint_read(a, x, zeros, x->shape, x->dtype, one));
        must(loom_checkpoint_read(b, y, zeros, y->shape, y->dtype, two));
        assert_memory_equal(one, two, bytes);
        free(one);
        free(two);
    }
}

/* The copies stay in the build tree, where tools/verify_with_megatron can have the real loaders read them. */
static void a_written_checkpoint_is_read_back(void **state) {
    (void)state;
    mkdir(MEGALOOM_BUILD "/checkpoints", 0777);
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        char path[4096], name[256];
        loom_checkpoint *from = open_case(i), *back = NULL;
        snprintf(path, sizeof path, "%s", cases.gl_pathv[i]);
        *strrchr(path, '/') = '\0';
        snprintf(name, sizeof name, "%s", strrchr(path, '/') + 1);
        snprintf(path, sizeof path, MEGALOOM_BUILD "/checkpoints/%s", name);
        rewrite(from, path);
        must(loom_checkpoint_open(path, &back));
        check_same_tensors(from, back);
        if (loom_checkpoint_get_info(from)->common) {
            char *wanted = NULL, *found = NULL;
            must(loom_value_to_json(loom_checkpoint_get_info(from)->common, 0, &wanted));
            must(loom_value_to_json(loom_checkpoint_get_info(back)->common, 0, &found));
            assert_string_equal(wanted, found);
            free(wanted);
            free(found);
        }
        loom_checkpoint_close(back);
        loom_checkpoint_close(from);
        must(loom_checkpoint_verify(path, NULL, NULL, &(loom_checkpoint_verified){0}));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tensor_is_what_the_manifest_says),
        cmocka_unit_test(every_object_is_what_the_manifest_says),
        cmocka_unit_test(every_common_state_is_what_torch_reads),
        cmocka_unit_test(any_box_is_a_part_of_the_whole),
        cmocka_unit_test(a_written_checkpoint_is_read_back),
    };
    cases = golden_glob("ckpt/*/manifest.json");
    int failed = cmocka_run_group_tests_name("golden checkpoints", tests, NULL, NULL);
    globfree(&cases);
    return failed;
}
