/* The name that was meant, as a command that takes the fields of a layout asks for it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/names.h>
#include <string.h>

#define TEST(name) static void name(void **state)

static const char *const fields[] = {"tensor", "context", "expert", "order", "border"};
enum { FIELDS = sizeof fields / sizeof *fields };

static void expect(const char *name, const char *meant) {
    const char *found = loom_nearest_name(name, fields, FIELDS);
    if (meant) {
        assert_non_null(found);
        assert_string_equal(found, meant);
    } else {
        assert_null(found);
    }
}

TEST(a_third_of_the_name_may_differ_and_no_more) {
    (void)state;
    expect("tensr", "tensor");
    expect("contxet", "context");
    expect("exprts", "expert");
    expect("expt", NULL);
    expect("exprts_", NULL);
    expect("or", NULL);
    expect("", NULL);
    expect("sequence", NULL);
}

TEST(the_nearest_wins_and_of_equals_the_first) {
    (void)state;
    expect("border", "border");
    expect("order", "order");
    static const char *const equals[] = {"pp_dp", "tp_dp", "cp_dp"};
    assert_ptr_equal(loom_nearest_name("xp_dp", equals, 3), equals[0]);
    assert_ptr_equal(loom_nearest_name("xp_dp", equals + 1, 2), equals[1]);
    assert_null(loom_nearest_name("tp_dp", equals, 0));
}

TEST(endless_names_are_near_to_none) {
    (void)state;
    char name[200];
    memset(name, 'a', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    const char *const candidates[] = {name, "a"};
    assert_null(loom_nearest_name(name, candidates, 2));
    assert_null(loom_nearest_name("a", candidates, 1));
    assert_ptr_equal(loom_nearest_name("a", candidates, 2), candidates[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_third_of_the_name_may_differ_and_no_more),
        cmocka_unit_test(the_nearest_wins_and_of_equals_the_first),
        cmocka_unit_test(endless_names_are_near_to_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
