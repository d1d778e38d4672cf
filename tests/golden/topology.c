/* Process groups against the numbers of Megatron-Core, Megatron-LM and NeMo (tests/golden/topology/README.md). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/layout.h>

#include "support/golden.h"

/* Sizes of a case. A given zero is a value like any other, and a bad one, while 0 means "absent" in the structure. */
static int64_t optional_size(const json_t *item, const char *key) {
    int64_t value = golden_int(item, key, 0);
    return value == 0 && json_is_integer(json_object_get(item, key)) ? -1 : value;
}

static loom_parallel_sizes case_sizes(const json_t *item) {
    loom_parallel_sizes sizes = {
        .world = golden_int(item, "world", 0),
        .tensor = golden_int(item, "tp", 1),
        .pipeline = golden_int(item, "pp", 1),
        .virtual_pipeline = optional_size(item, "vpp"),
        .context = golden_int(item, "cp", 1),
        .expert = golden_int(item, "ep", 1),
        .expert_tensor = optional_size(item, "etp"),
        .encoder_tensor = golden_int(item, "enc_tp", 0),
        .encoder_pipeline = golden_int(item, "enc_pp", 0),
        .optimizer_instances = golden_int(item, "inst", 1),
        .use_tp_pp_dp_mapping = golden_int(item, "use_tp_pp_dp_mapping", 0) != 0,
    };
    const json_t *levels = json_object_get(item, "hcp");
    size_t i;
    json_t *level;
    json_array_foreach(levels, i, level) {
        if (i < LOOM_LAYOUT_HCP_LEVELS)
            sizes.hierarchical_context[i] = json_integer_value(level);
    }
    sizes.hierarchical_levels = (int)json_array_size(levels);
    snprintf(sizes.order, sizeof sizes.order, "%s", golden_string(item, "order", ""));
    return sizes;
}

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

/* Every group of the file is ours, every group of ours is in the file, and every rank is found where the list has it.
 */
static void check_groups(const char *id, const loom_layout *layout, const json_t *groups, bool encoder_file) {
    for (int k = 0; k < LOOM_GROUP_KIND_COUNT; k++) {
        loom_group_kind kind = (loom_group_kind)k;
        const char *name = loom_layout_kind_name(kind);
        const json_t *lists = json_object_get(groups, name);
        int64_t count = loom_layout_group_count(layout, kind);
        if (encoder_file && kind == LOOM_GROUP_INTRA_DIST_OPT)
            continue; /* not recorded there */
        check(count == (int64_t)json_array_size(lists), "%s: %s: %lld groups, expected %zu", id, name, (long long)count,
            json_array_size(lists));
        for (int64_t i = 0; i < count; i++) {
            const json_t *list = json_array_get(lists, (size_t)i);
            int64_t size = loom_layout_group_size(layout, kind, i), before = -1;
            check(size == (int64_t)json_array_size(list), "%s: %s %lld has %lld members, expected %zu", id, name,
                (long long)i, (long long)size, json_array_size(list));
            for (int64_t p = 0; p < size; p++) {
                int64_t expected = json_integer_value(json_array_get(list, (size_t)p));
                int64_t listed = loom_layout_group_listed(layout, kind, i, p);
                int64_t member = loom_layout_group_member(layout, kind, i, p), first = -1, place = -1;
                check(listed == expected, "%s: %s %lld position %lld is rank %lld, expected %lld", id, name,
                    (long long)i, (long long)p, (long long)listed, (long long)expected);
                check(member > before, "%s: %s %lld is not ascending", id, name, (long long)i);
                int64_t holding = loom_layout_groups_of(layout, kind, member, &first, &place);
                check(i >= first && i < first + holding && place == p, "%s: %s: rank %lld is not found in group %lld",
                    id, name, (long long)member, (long long)i);
                before = member;
            }
        }
    }
    const char *name;
    json_t *lists;
    json_object_foreach((json_t *)groups, name, lists)
        check(loom_layout_kind_from_name(name) < LOOM_GROUP_KIND_COUNT, "%s: unknown kind %s", id, name);
}

static const struct {
    const char *key;
    size_t offset;
} number_fact[] = {
#define FACT(name)                                                                                                     \
    { #name, offsetof(loom_layout_rank, name) }
    FACT(tp), FACT(cp), FACT(dp), FACT(dp_cp), FACT(pp), FACT(ep), FACT(etp), FACT(edp), FACT(tp_size), FACT(pp_size),
    FACT(tp_src), FACT(mp_src), FACT(dp_src), FACT(pp_next), FACT(pp_prev), FACT(pp_first), FACT(pp_last)};

/* Compares one fact of one rank; false for a key that it does not know. */
static bool check_fact(const char *id, const loom_layout *layout, int64_t rank, const char *key, const json_t *value) {
    loom_layout_rank r;
    assert_true(loom_layout_rank_describe(layout, rank, &r));
    int64_t found = -1, expected = json_integer_value(value);
    for (size_t f = 0; f < sizeof number_fact / sizeof *number_fact; f++) {
        if (strcmp(key, number_fact[f].key) == 0)
            memcpy(&found, (const char *)&r + number_fact[f].offset, sizeof found);
    }
    if (json_is_array(value)) {
        check(json_array_size(value) == (size_t)r.pipelines, "%s: rank %lld is in %lld pipelines, expected %zu", id,
            (long long)rank, (long long)r.pipelines, json_array_size(value));
        for (int64_t which = 0; which < r.pipelines; which++) {
            int64_t next, previous, first, last;
            assert_true(loom_layout_pipeline_describe(layout, rank, which, &next, &previous, &first, &last));
            found = strcmp(key, "pp_next") == 0 ? next : strcmp(key, "pp_prev") == 0 ? previous : last;
            expected = json_integer_value(json_array_get(value, (size_t)which));
            check(found == expected, "%s: rank %lld %s[%lld] is %lld, expected %lld", id, (long long)rank, key,
                (long long)which, (long long)found, (long long)expected);
        }
        return strcmp(key, "pp_next") == 0 || strcmp(key, "pp_prev") == 0 || strcmp(key, "pp_last") == 0;
    }
    if (strcmp(key, "embd") == 0)
        found = r.embd;
    else if (strcmp(key, "pos_embd") == 0)
        found = r.pos_embd;
    else if (strcmp(key, "inside_encoder") == 0)
        found = r.encoder;
    else if (strcmp(key, "inside_decoder") == 0)
        found = !r.encoder;
    else if (found == -1)
        return false;
    check(found == expected, "%s: rank %lld has %s %lld, expected %lld", id, (long long)rank, key, (long long)found,
        (long long)expected);
    return true;
}

static void check_ranks(const char *id, const loom_layout *layout, const json_t *ranks) {
    const char *key;
    json_t *values;
    json_object_foreach((json_t *)ranks, key, values) {
        /* Without encoder ranks the reference's "inside the encoder" says nothing. */
        if (strncmp(key, "inside_", 7) == 0 && layout->encoder_ranks == 0)
            continue;
        check((int64_t)json_array_size(values) == loom_layout_world_size(layout), "%s: %s: %zu ranks", id, key,
            json_array_size(values));
        for (size_t rank = 0; rank < json_array_size(values); rank++)
            check(check_fact(id, layout, (int64_t)rank, key, json_array_get(values, rank)), "%s: unknown key %s", id,
                key);
    }
}

/* The layout of a case that must be accepted. */
static void accept(const json_t *item, loom_layout *layout) {
    loom_parallel_sizes sizes = case_sizes(item);
    loom_status status = loom_layout_init(&sizes, layout);
    check(status == LOOM_OK, "%s: refused: %s", golden_string(item, "id", "?"), loom_error_message());
}

static void refuse(const json_t *item, const char *word) {
    loom_parallel_sizes sizes = case_sizes(item);
    loom_layout layout;
    loom_error_clear();
    loom_status status = loom_layout_init(&sizes, &layout);
    const char *id = golden_string(item, "id", "?");
    check(status == LOOM_ERR_CONFIG, "%s: %s: status %s, expected LOOM_ERR_CONFIG", id,
        golden_string(item, "reason", ""), loom_status_name(status));
    check(strstr(loom_error_message(), word), "%s: '%s' does not name '%s'", id, loom_error_message(), word);
}

typedef struct tally {
    int run, refused, left;
} tally;

/* Calls run on each case of the files; prints what came of them. */
static void each_case(const char *pattern, void (*run)(const json_t *item, tally *counts), int files_wanted) {
    glob_t found = golden_glob(pattern);
    tally total = {0};
    for (size_t f = 0; f < found.gl_pathc; f++) {
        json_t *file = golden_json(found.gl_pathv[f]);
        size_t i;
        json_t *item;
        json_array_foreach(json_object_get(file, "cases"), i, item) run(item, &total);
        json_decref(file);
    }
    print_message("%s: %zu files, %d cases ran (%d of them refused, as they must be), %d left out\n", pattern,
        found.gl_pathc, total.run, total.refused, total.left);
    /* Another tree (MEGALOOM_GOLDEN) may hold fewer files; our own may not. */
    if (!getenv("MEGALOOM_GOLDEN"))
        assert_true((int)found.gl_pathc >= files_wanted && total.run > 0);
    globfree(&found);
}

static void groups_case(const json_t *item, tally *counts) {
    const char *id = golden_string(item, "id", "?");
    counts->run++;
    if (golden_int(item, "error", 0)) {
        counts->refused++;
        refuse(item, "");
        return;
    }
    loom_layout layout;
    accept(item, &layout);
    check(loom_layout_data_parallel_size(&layout) == golden_int(item, "dp", -1), "%s: data parallel size", id);
    check(loom_layout_expert_data_parallel_size(&layout) == golden_int(item, "edp", -1), "%s: expert data", id);
    check_groups(id, &layout, json_object_get(item, "groups"), false);
    check_ranks(id, &layout, json_object_get(item, "rank"));
}

static void groups_and_places_are_those_of_megatron_core(void **state) {
    (void)state;
    each_case("topology/groups*.json", groups_case, 1);
}

static void nemo_facts(const char *id, const loom_layout *layout, const json_t *nemo) {
    check(loom_layout_model_parallel_size(layout) == golden_int(nemo, "model_parallel_size", -1),
        "%s: model parallel size %lld", id, (long long)loom_layout_model_parallel_size(layout));
    check(loom_layout_data_parallel_size(layout) == golden_int(nemo, "data_parallel_size", -1),
        "%s: data parallel size %lld", id, (long long)loom_layout_data_parallel_size(layout));
    check(loom_layout_virtual_pipeline_rank(layout) == golden_int(nemo, "vp_rank", -1), "%s: virtual rank", id);
    check_ranks(id, layout, json_object_get(nemo, "rank"));
}

static void nemo_case(const json_t *item, tally *counts) {
    counts->run++;
    if (golden_int(item, "error", 0)) {
        counts->refused++;
        refuse(item, "");
        return;
    }
    loom_layout layout;
    accept(item, &layout);
    nemo_facts(golden_string(item, "id", "?"), &layout, item);
}

static void ranks_before_any_group_are_those_of_nemo(void **state) {
    (void)state;
    each_case("topology/nemo_start*.json", nemo_case, 1);
}

static void encoder_case(const json_t *item, tally *counts) {
    const char *id = golden_string(item, "id", "?");
    counts->run++;
    if (golden_int(item, "error", 0) || golden_int(item, "pp_mixes_dp_cp", 0)) {
        counts->refused++;
        refuse(item, golden_int(item, "error", 0) ? "" : "encoder_tensor_model_parallel_size");
        return;
    }
    loom_layout layout;
    accept(item, &layout);
    check_groups(id, &layout, json_object_get(item, "groups"), true);
    check_ranks(id, &layout, json_object_get(item, "rank"));
    const json_t *pipelines = json_object_get(item, "pp_groups_per_rank");
    for (size_t rank = 0; rank < json_array_size(pipelines); rank++) {
        int64_t first, place;
        assert_int_equal(loom_layout_groups_of(&layout, LOOM_GROUP_PP, (int64_t)rank, &first, &place),
            json_integer_value(json_array_get(pipelines, rank)));
    }
    const json_t *nemo = json_object_get(item, "nemo_fake");
    if (nemo && !golden_int(nemo, "error", 0))
        nemo_facts(id, &layout, nemo);
}

static void encoder_groups_are_those_of_megatron_0_12(void **state) {
    (void)state;
    each_case("topology/encoder_v012*.json", encoder_case, 1);
}

/* The case of the other file with the same sizes, or NULL. */
static const json_t *twin(const json_t *item, const json_t *files) {
    static const char *const key[] = {"world", "tp", "pp", "vpp", "cp", "ep", "etp", "order", "enc_tp", "enc_pp"};
    size_t f, i;
    json_t *file, *other;
    json_array_foreach(files, f, file) {
        json_array_foreach(json_object_get(file, "cases"), i, other) {
            bool same = true;
            for (size_t k = 0; k < sizeof key / sizeof *key; k++) {
                const json_t *a = json_object_get(item, key[k]), *b = json_object_get(other, key[k]);
                same &= (a && b) ? json_equal(a, b) : !a && !b;
            }
            /* The encoder files do not say that they have one optimizer instance. */
            same &= golden_int(item, "inst", 1) == golden_int(other, "inst", 1);
            if (same)
                return other;
        }
    }
    return NULL;
}

static json_t *v012_files;

static void old_encoder_case(const json_t *item, tally *counts) {
    const json_t *newer = twin(item, v012_files);
    if (newer && !json_equal(json_object_get(item, "groups"), json_object_get(newer, "groups"))) {
        counts->left++;
        return;
    }
    encoder_case(item, counts);
}

static void load_v012(void) {
    glob_t found = golden_glob("topology/encoder_v012*.json");
    v012_files = json_array();
    for (size_t f = 0; f < found.gl_pathc; f++)
        json_array_append_new(v012_files, golden_json(found.gl_pathv[f]));
    globfree(&found);
}

static void encoder_groups_are_those_of_megatron_0_11_where_the_two_agree(void **state) {
    (void)state;
    each_case("topology/encoder_v011*.json", old_encoder_case, 1);
}

/* NeMo of 2025-09 refuses every encoder, with sizes that Megatron-LM v0.12 lays out; v0.12 is the rule. */
static void invalid_case(const json_t *item, tally *counts) {
    const json_t *legal = twin(item, v012_files);
    if (golden_int(item, "enc_pp", 0) > 0 && legal && !golden_int(legal, "pp_mixes_dp_cp", 0) &&
        !golden_int(legal, "error", 0)) {
        print_message("left out: %s (%s): %s lays it out\n", golden_string(item, "id", "?"),
            golden_string(item, "reason", "?"), golden_string(legal, "id", "?"));
        counts->left++;
        return;
    }
    counts->run++;
    if (golden_int(item, "error", 0)) {
        counts->refused++;
        refuse(item, "");
    } else {
        loom_layout layout;
        accept(item, &layout);
    }
}

static void invalid_sizes_are_refused_also_where_the_reference_lets_them_pass(void **state) {
    (void)state;
    each_case("topology/invalid*.json", invalid_case, 1);
}

int main(void) {
    load_v012();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_and_places_are_those_of_megatron_core),
        cmocka_unit_test(ranks_before_any_group_are_those_of_nemo),
        cmocka_unit_test(encoder_groups_are_those_of_megatron_0_12),
        cmocka_unit_test(encoder_groups_are_those_of_megatron_0_11_where_the_two_agree),
        cmocka_unit_test(invalid_sizes_are_refused_also_where_the_reference_lets_them_pass),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    json_decref(v012_files);
    return failed;
}
