/* Ranks that share a sequence compute what one rank does: losses and norms within the rounding of their sums, whatever
 * hides keys (causality, windows, documents, dropout), however keys travel, with tensor ranks, stages and shards. */
#include "parallel/shared_model.h"

static void keys_travel_in_four_ways(void **state) {
    (void)state;
    const shared_case cases[] = {{.cp = 2}, {.cp = 3}, {.cp = 4}, {.cp = 6}, {.cp = 12, .groups = 4},
        {.cp = 2, .type = "all_gather"}, {.cp = 3, .type = "all_gather", .groups = 4}, {.cp = 4, .type = "all_gather"},
        {.cp = 2, .type = "a2a"}, {.cp = 3, .type = "a2a"}, {.cp = 4, .type = "a2a", .groups = 4},
        {.cp = 4, .type = "a2a+p2p", .inner = 2}, {.cp = 6, .type = "a2a+p2p", .inner = 3},
        {.cp = 6, .type = "a2a+p2p", .inner = 2, .groups = 2}, {.cp = 4, .type = "a2a+p2p", .inner = 4},
        {.cp = 4, .type = "a2a+p2p", .inner = 1}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* Every stage has other layers, one of them perhaps none of a type that its neighbours have. */
static void each_layer_may_have_its_own_way(void **state) {
    (void)state;
    const shared_case cases[] = {{.cp = 2, .types = {"p2p", "a2a", "all_gather", "p2p"}},
        {.cp = 4, .types = {"a2a+p2p", "p2p", "a2a", "all_gather"}, .inner = 2},
        {.cp = 4, .types = {"p2p", "a2a+p2p", "a2a+p2p", "a2a"}, .inner = 2, .groups = 4, .window = 9},
        {.cp = 2, .types = {"p2p", "p2p", "a2a", "a2a"}, .documents = true, .micro = 2},
        {.cp = 4, .types = {"a2a", "all_gather", "a2a+p2p", "p2p"}, .inner = 2, .documents = true, .learned = true},
        {.cp = 2, .types = {"p2p", "a2a", "all_gather", "a2a"}, .pp = 2},
        {.cp = 2, .types = {"p2p", "p2p", "a2a", "all_gather"}, .pp = 2, .vpp = 2, .dropout = 0.2},
        {.cp = 4, .types = {"a2a+p2p", "p2p", "a2a", "all_gather"}, .inner = 2, .pp = 2, .vpp = 2, .full = true},
        {.cp = 2, .types = {"all_gather", "a2a", "p2p", "a2a"}, .tp = 2, .sp = true, .selective = true},
        {.ranks = 8, .cp = 4, .types = {"a2a+p2p", "p2p", "a2a", "all_gather"}, .inner = 2, .sharded = true},
        {.cp = 2, .types = {"a2a", "p2p", "all_gather", "p2p"}, .precision = "bf16-mixed"},
        {.cp = 2, .types = {"a2a", "p2p", "all_gather", "p2p"}, .pp = 4, .schedule = "zero-bubble"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void what_hides_a_key_hides_it_on_any_rank(void **state) {
    (void)state;
    const shared_case cases[] = {{.cp = 3, .window = 5}, {.cp = 2, .window = 7, .type = "all_gather"},
        {.cp = 4, .window = 5, .type = "a2a"}, {.cp = 4, .window = 9, .type = "a2a+p2p", .inner = 2},
        {.cp = 3, .documents = true}, {.cp = 4, .documents = true}, {.cp = 4, .documents = true, .learned = true},
        {.cp = 2, .documents = true, .type = "all_gather", .micro = 2},
        {.cp = 3, .documents = true, .type = "a2a", .micro = 2},
        {.cp = 4, .documents = true, .type = "a2a+p2p", .inner = 2, .micro = 2}, {.cp = 3, .dropout = 0.2, .micro = 2},
        {.cp = 2, .dropout = 0.2, .type = "all_gather"}, {.cp = 4, .dropout = 0.2, .type = "a2a"},
        {.cp = 4, .dropout = 0.2, .type = "a2a+p2p", .inner = 2},
        {.cp = 2, .dropout = 0.2, .learned = true, .documents = true, .window = 8}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void other_parallelism_goes_along(void **state) {
    (void)state;
    const shared_case cases[] = {{.cp = 2, .tp = 2, .sp = true, .dropout = 0.1},
        {.cp = 2, .tp = 3, .sp = true, .dropout = 0.1, .groups = 6, .learned = true}, {.cp = 3, .tp = 4, .sp = true},
        {.cp = 2, .pp = 2, .micro = 1}, {.cp = 2, .pp = 2, .vpp = 2}, {.cp = 2, .pp = 2, .tp = 2, .sp = true},
        {.ranks = 4, .cp = 2, .sharded = true}, {.ranks = 4, .cp = 2, .average = true},
        {.ranks = 6, .cp = 3, .sharded = true, .type = "all_gather"}, {.cp = 2, .selective = true, .dropout = 0.1},
        {.ranks = 8, .cp = 2, .tp = 2, .sp = true, .sharded = true, .type = "a2a"},
        {.cp = 2, .precision = "bf16-mixed"}, {.cp = 3, .precision = "bf16-mixed", .type = "all_gather"},
        {.cp = 4, .precision = "bf16-mixed", .type = "a2a+p2p", .inner = 2},
        {.cp = 2, .precision = "16-mixed", .sharded = true}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* Everything that is as long as the sequence is cut: activations, and what attention keeps of keys, queries and sums.
 */
static void memory_falls_with_the_number_of_context_ranks(void **state) {
    (void)state;
    /* Sequences long enough to tell are too long for a sanitizer, which changes no size of these. */
    if (FEW > 1)
        skip();
    const shared_case alone = {.length = 768};
    double whole = (double)run_it(&alone).high_water;
    static const char *const types[] = {"p2p", "a2a", "all_gather"};
    for (int type = 0; type < 3; type++)
        for (int cp = 2; cp <= 4; cp *= 2) {
            const shared_case c = {.cp = cp, .type = types[type], .length = 768};
            double share = (double)run_it(&c).high_water / whole;
            printf("cp %d %s: %.3f of one rank's memory\n", cp, types[type], share);
            assert_true(share < (type == 2 ? 1.35 : 1.2) / cp);
        }
}

static void expect_refusal(shared_case c, const char *words) {
    shared_result result;
    if (try_run(&c, &result) == LOOM_OK || !strstr(loom_error_message(), words))
        fail_msg("cp %d %s: found \"%s\", expected \"%s\"", c.cp, c.type ? c.type : "p2p", loom_error_message(), words);
}

static void what_cannot_be_shared_is_refused_with_its_numbers(void **state) {
    (void)state;
    expect_refusal((shared_case){.cp = 5}, "seq_length 24 cannot be cut into 2 chunks for each of the 5 ranks");
    expect_refusal((shared_case){.cp = 4, .type = "a2a", .groups = 2}, "the 12 heads and 2 query groups");
    expect_refusal((shared_case){.cp = 4, .type = "a2a+p2p"}, "product is context_parallel_size 4: found null");
    expect_refusal((shared_case){.cp = 4, .type = "a2a+p2p", .inner = 3}, "found [3, 1]");
    expect_refusal((shared_case){.cp = 4, .types = {"p2p", "a2a"}},
        "cp_comm_type: found a list of 2, expected one for each of num_layers 4 or one for all");
    expect_refusal((shared_case){.cp = 1, .types = {"p2p", "a2a", "p2p"}}, "cp_comm_type: found a list of 3");
    expect_refusal((shared_case){.cp = 4, .types = {"a2a", "p2p", "a2a", "a2a"}, .groups = 2},
        "cp_comm_type a2a of layers 0, 2 to 3: the 4 ranks of context_parallel_size cannot share the 12 heads and 2 "
        "query groups");
    expect_refusal((shared_case){.cp = 4, .types = {"p2p", "a2a+p2p", "p2p", "p2p"}},
        "cp_comm_type a2a+p2p of layer 1 needs hierarchical_context_parallel_sizes of two levels");
    expect_refusal(
        (shared_case){.cp = 8, .types = {"p2p", "a2a", "a2a+p2p", "p2p"}, .inner = 8, .groups = 4, .length = 64},
        "cp_comm_type a2a+p2p of layer 2: the 8 ranks of the inner level of hierarchical_context_parallel_sizes cannot "
        "share the 12 heads and 4 query groups");
    expect_refusal((shared_case){.cp = 2, .types = {"p2p", "ring", "p2p", "p2p"}},
        "found [p2p, ring, p2p, p2p], expected one of p2p, all_gather, a2a, a2a+p2p, or a list of at most 512 of them");
    expect_refusal((shared_case){.cp = 2, .type = "ring"}, "found ring, expected one of p2p, all_gather, a2a, a2a+p2p");
}

static void the_same_holds_on_mpi_ranks(void **state) {
    (void)state;
    const shared_case cases[] = {{.cp = 2}, {.cp = 2, .type = "all_gather", .window = 5},
        {.cp = 2, .type = "a2a", .documents = true}, {.cp = 3, .dropout = 0.2},
        {.cp = 3, .type = "a2a", .precision = "bf16-mixed"}, {.cp = 4},
        {.cp = 4, .type = "a2a+p2p", .inner = 2, .documents = true}, {.cp = 2, .pp = 2},
        {.cp = 4, .types = {"a2a+p2p", "p2p", "a2a", "all_gather"}, .inner = 2},
        {.cp = 2, .tp = 2, .sp = true, .sharded = true}};
    ALL_EQUAL_ONE_RANK_ON_MPI(cases);
}

int main(int argc, char **argv) {
    const struct CMUnitTest on_mpi[] = {cmocka_unit_test(the_same_holds_on_mpi_ranks)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_travel_in_four_ways),
        cmocka_unit_test(each_layer_may_have_its_own_way),
        cmocka_unit_test(what_hides_a_key_hides_it_on_any_rank),
        cmocka_unit_test(other_parallelism_goes_along),
        cmocka_unit_test(memory_falls_with_the_number_of_context_ranks),
        cmocka_unit_test(what_cannot_be_shared_is_refused_with_its_numbers),
    };
    (void)argv;
    return argc > 1 ? cmocka_run_group_tests(on_mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
