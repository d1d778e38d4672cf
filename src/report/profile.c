/* A profile for people and for programs. Invariant: what is shown adds up to the measured time, since what is too short
 * for a line of its own is joined, never left out. */
#include <errno.h>
#include <jansson.h>
#include <megaloom/profile.h>
#include <stdlib.h>
#include <string.h>

#define SHORTEST_SHARE 1e-3 /* of an entry with a line of its own */

static bool is_rest(const loom_profile_entry *entry) {
    return strcmp(entry->operation, "rest") == 0;
}

static double share_of(const loom_profile *profile, double seconds) {
    return profile->seconds > 0 ? seconds / profile->seconds : 0;
}

double loom_profile_named_share(const loom_profile *profile) {
    double named = 0;
    for (int64_t i = 0; i < profile->count; i++)
        if (!is_rest(&profile->entries[i]))
            named += profile->entries[i].seconds;
    return share_of(profile, named);
}

static void put_rate(FILE *out, double work, double seconds) {
    if (work > 0 && seconds > 0)
        fprintf(out, " %9.1f", work / seconds * 1e-9);
    else
        fprintf(out, " %9s", "");
}

static void put_time(FILE *out, const loom_profile *profile, double seconds, int64_t steps) {
    fprintf(out, " %10.3f %6.1f%%", seconds * 1e3 / (double)steps, 100 * share_of(profile, seconds));
}

void loom_profile_print(FILE *out, const loom_profile *profile, int64_t steps) {
    steps = steps > 0 ? steps : 1;
    double joined = 0;
    int64_t joined_calls = 0;
    fprintf(out, "%-16s %-34s %9s %10s %7s %9s %9s\n", "phase", "operation", "calls", "ms/step", "share", "GFLOP/s",
        "GB/s");
    for (int64_t i = 0; i < profile->count; i++) {
        const loom_profile_entry *entry = &profile->entries[i];
        char name[80];
        if (share_of(profile, entry->seconds) < SHORTEST_SHARE) {
            joined += entry->seconds;
            joined_calls += entry->calls;
            continue;
        }
        snprintf(name, sizeof name, "%s%s%s", entry->operation, *entry->group ? " of group " : "", entry->group);
        fprintf(out, "%-16s %-34s %9lld", loom_profile_phase_name(entry->phase), name, (long long)entry->calls);
        put_time(out, profile, entry->seconds, steps);
        put_rate(out, entry->flops, entry->seconds);
        put_rate(out, entry->bytes, entry->seconds);
        fputc('\n', out);
    }
    fprintf(out, "%-16s %-34s %9lld", "", "all shorter ones", (long long)joined_calls);
    put_time(out, profile, joined, steps);
    fprintf(out, "\n%lld step%s of %.3f ms; named operations explain %.1f%%\n", (long long)steps, steps == 1 ? "" : "s",
        profile->seconds * 1e3 / (double)steps, 100 * loom_profile_named_share(profile));
}

/* ---- the file ---- */

static json_t *entry_object(const loom_profile *profile, const loom_profile_entry *entry) {
    json_t *object = json_pack("{s:s, s:s, s:s, s:I, s:f, s:f}", "phase", loom_profile_phase_name(entry->phase),
        "operation", entry->operation, "group", entry->group, "calls", (json_int_t)entry->calls, "seconds",
        entry->seconds, "share", share_of(profile, entry->seconds));
    if (object && entry->flops > 0 && entry->seconds > 0)
        json_object_set_new(object, "flops_per_second", json_real(entry->flops / entry->seconds));
    if (object && entry->bytes > 0 && entry->seconds > 0)
        json_object_set_new(object, "bytes_per_second", json_real(entry->bytes / entry->seconds));
    return object;
}

/* One rank as JSON text, to be freed; NULL when memory is out. */
static char *rank_text(loom_comm *comm, const loom_profile *profile) {
    json_t *entries = json_array();
    for (int64_t i = 0; entries && i < profile->count; i++)
        if (profile->entries[i].calls > 0 || profile->entries[i].seconds > 0)
            json_array_append_new(entries, entry_object(profile, &profile->entries[i]));
    json_t *object = json_pack("{s:i, s:f, s:f, s:o}", "rank", loom_comm_world_rank(comm, loom_comm_rank(comm)),
        "seconds", profile->seconds, "named_share", loom_profile_named_share(profile), "entries", entries);
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    return text;
}

static loom_status write_file(const char *path, const char *texts, const int64_t *lengths, int members, int64_t steps) {
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    fprintf(file, "{\"steps\": %lld, \"ranks\": [", (long long)steps);
    for (int i = 0; i < members; texts += lengths[i], i++)
        fprintf(file, "%s\n%.*s", i == 0 ? "" : ",", (int)lengths[i], texts);
    fprintf(file, "\n]}\n");
    bool bad = ferror(file) != 0;
    if (fclose(file) != 0 || bad)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return LOOM_OK;
}

loom_status loom_profile_write(const char *path, loom_comm *comm, const loom_profile *profile, int64_t steps) {
    int members = loom_comm_size(comm);
    char *mine = rank_text(comm, profile), *all = NULL;
    int64_t length = mine ? (int64_t)strlen(mine) : 0, total = 0;
    int64_t *lengths = calloc((size_t)members, sizeof *lengths);
    loom_status status = loom_agree(
        comm, mine && lengths ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a profile"));
    if (!status)
        status = loom_all_gather(comm, &length, lengths, 1, LOOM_I64);
    for (int i = 0; !status && i < members; i++)
        total += lengths[i];
    if (!status) {
        all = malloc((size_t)total + 1);
        status = loom_agree(
            comm, all ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the profiles of %d ranks", members));
    }
    if (!status)
        status = loom_all_gather_v(comm, mine, all, lengths, LOOM_U8);
    if (!status)
        status = loom_agree(comm, loom_comm_rank(comm) == 0 ? write_file(path, all, lengths, members, steps) : LOOM_OK);
    loom_comm_free(comm, all);
    loom_comm_free(comm, mine);
    loom_comm_free(comm, lengths);
    return status;
}
