/* Event files, read back by a decoder that shares nothing with the writer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <megaloom/report.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the decoder ---- */

/* CRC-32C by its polynomial in the bit order of the standard, unlike the writer's reflected one. */
static uint32_t crc32c(const unsigned char *bytes, size_t count) {
    uint32_t crc = 0xffffffffu, reflected = 0;
    for (size_t i = 0; i < count; i++)
        for (int bit = 0; bit < 8; bit++) {
            uint32_t in = (bytes[i] >> bit & 1u) ^ crc >> 31;
            crc = crc << 1 ^ (in ? 0x1edc6f41u : 0);
        }
    for (int bit = 0; bit < 32; bit++)
        reflected |= (crc >> bit & 1u) << (31 - bit);
    return ~reflected;
}

static uint32_t unmasked(uint32_t masked) {
    uint32_t rotated = masked - 0xa282ead8u;
    return rotated >> 17 | rotated << 15;
}

static uint64_t little(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

typedef struct field {
    int number, wire;
    uint64_t value;
    const unsigned char *bytes;
    size_t length;
} field;

static uint64_t varint(const unsigned char **at) {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        unsigned char byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return value;
    }
}

static field next_field(const unsigned char **at) {
    uint64_t key = varint(at);
    field f = {.number = (int)(key >> 3), .wire = (int)(key & 7)};
    if (f.wire == 0) {
        f.value = varint(at);
    } else if (f.wire == 2) {
        f.length = varint(at);
        f.bytes = *at;
        *at += f.length;
    } else {
        int bytes = f.wire == 1 ? 8 : 4;
        assert_true(f.wire == 1 || f.wire == 5);
        f.value = little(*at, bytes);
        *at += bytes;
    }
    return f;
}

typedef struct file {
    unsigned char bytes[1 << 16];
    size_t length, at;
} file;

/* The next record's bytes, its checksums looked at; NULL at the end. */
static const unsigned char *next_record(file *of, size_t *length) {
    if (of->at == of->length)
        return NULL;
    const unsigned char *head = of->bytes + of->at;
    assert_true(of->at + 12 <= of->length);
    *length = little(head, 8);
    assert_int_equal(unmasked((uint32_t)little(head + 8, 4)), crc32c(head, 8));
    assert_true(of->at + 16 + *length <= of->length);
    assert_int_equal(unmasked((uint32_t)little(head + 12 + *length, 4)), crc32c(head + 12, *length));
    of->at += 16 + *length;
    return head + 12;
}

static int read_files(const char *folder, file *files, int most) {
    struct dirent **names;
    int count = scandir(folder, &names, NULL, alphasort), found = 0;
    assert_true(count >= 0);
    for (int i = 0; i < count; i++) {
        char path[1024];
        if (strstr(names[i]->d_name, "tfevents") && found < most) {
            snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
            FILE *in = fopen(path, "rb");
            assert_non_null(in);
            files[found].length = fread(files[found].bytes, 1, sizeof files[found].bytes, in);
            files[found].at = 0;
            fclose(in);
            unlink(path);
            found++;
        }
        free(names[i]);
    }
    free(names);
    return found;
}

/* The scalar of that tag in a summary; NaN where there is none. */
static double scalar(const unsigned char *summary, size_t length, const char *tag) {
    double value = NAN;
    for (const unsigned char *at = summary; at < summary + length;) {
        field entry = next_field(&at);
        bool this = false;
        assert_int_equal(entry.number, 1);
        for (const unsigned char *in = entry.bytes; in < entry.bytes + entry.length;) {
            field part = next_field(&in);
            if (part.number == 1)
                this = part.length == strlen(tag) && memcmp(part.bytes, tag, part.length) == 0;
            else if (part.number == 2 && this) {
                uint32_t bits = (uint32_t)part.value;
                float single;
                memcpy(&single, &bits, sizeof single);
                value = single;
            }
        }
    }
    return value;
}

/* ---- claims ---- */

static void the_decoder_knows_the_checksum_of_the_standard(void **state) {
    (void)state;
    assert_int_equal(crc32c((const unsigned char *)"123456789", 9), 0xe3069283u);
}

static void a_file_has_the_version_a_session_and_the_scalars_of_each_step(void **state) {
    char folder[] = MEGALOOM_BUILD "/events-XXXXXX";
    static file files[2];
    loom_events *events;
    (void)state;
    assert_non_null(mkdtemp(folder));
    assert_int_equal(loom_events_open(folder, 301, &events), LOOM_OK);
    for (int64_t step = 301; step <= 303; step++) {
        loom_step_report report = {.step = step,
            .loss = 2.5 + (double)step,
            .grad_norm = NAN,
            .learning_rate = step == 302 ? INFINITY : 1e-3,
            .validation_loss = NAN,
            .consumed_samples = 16 * step,
            .memory_bytes = INT64_C(1) << 33};
        assert_int_equal(loom_events_write(events, &report), LOOM_OK);
    }
    loom_events_close(events);
    loom_events_close(NULL);
    assert_int_equal(read_files(folder, files, 2), 1);
    rmdir(folder);

    size_t length;
    for (int64_t number = 0; number < 5; number++) {
        const unsigned char *record = next_record(&files[0], &length), *at = record;
        assert_non_null(record);
        bool version = false, session = false, summary = false, time = false;
        int64_t step = -1;
        while (at < record + length) {
            field f = next_field(&at);
            time = time || (f.number == 1 && f.wire == 1 && f.value != 0);
            version = version || (f.number == 3 && f.length == 13 && memcmp(f.bytes, "brain.Event:2", 13) == 0);
            session = session || (f.number == 7 && f.length == 2 && f.bytes[0] == 8 && f.bytes[1] == 1);
            if (f.number == 2)
                step = (int64_t)f.value;
            if (f.number != 5)
                continue;
            summary = true;
            assert_true(scalar(f.bytes, f.length, "loss") == 2.5 + (double)step);
            assert_true(isnan(scalar(f.bytes, f.length, "grad_norm")));
            assert_true(scalar(f.bytes, f.length, "learning_rate") == (step == 302 ? INFINITY : (double)1e-3f));
            assert_true(scalar(f.bytes, f.length, "consumed_samples") == 16.0 * (double)step);
            assert_true(scalar(f.bytes, f.length, "memory_bytes") == 8589934592.0);
        }
        assert_true(time);
        assert_int_equal(version, number == 0);
        assert_int_equal(session, number == 1);
        assert_int_equal(summary, number > 1);
        assert_int_equal(step, number == 0 ? 0 : number == 1 ? 301 : 299 + number);
    }
    assert_null(next_record(&files[0], &length));
}

/* The scalar of that tag in the summaries of a step's records; NaN where there is none. Counts the records. */
static double scalar_of_step(file *of, const char *tag, int *records) {
    size_t length;
    double found = NAN;
    of->at = 0;
    *records = 0;
    for (const unsigned char *record; (record = next_record(of, &length)) != NULL;)
        for (const unsigned char *at = record; at < record + length;) {
            field f = next_field(&at);
            double value = f.number == 5 ? scalar(f.bytes, f.length, tag) : NAN;
            *records += f.number == 5;
            found = isnan(value) ? found : value;
        }
    return found;
}

/* More scalars than one record has room for. */
static void the_routers_of_many_layers_are_scalars_of_the_step(void **state) {
    enum { LAYERS = 100 };
    char folder[] = MEGALOOM_BUILD "/events-XXXXXX", tag[64];
    static file files[1];
    static loom_router_layer layers[LAYERS];
    const loom_router_statistics of = {.experts = 4,
        .limited = true,
        .layer_count = LAYERS,
        .layers = layers,
        .choices = 64,
        .dropped = 16,
        .load = 2,
        .losses = {1.5, NAN, NAN, 3}};
    const loom_step_report report = {.step = 7, .loss = 2.5, .router = &of, .router_layers = true};
    loom_events *events;
    int records;
    (void)state;
    for (int64_t i = 0; i < LAYERS; i++)
        layers[i] =
            (loom_router_layer){.layer = i, .choices = 64, .dropped = i, .load = 1, .losses = {(double)i, NAN, NAN, 3}};
    assert_non_null(mkdtemp(folder));
    assert_int_equal(loom_events_open(folder, 1, &events), LOOM_OK);
    assert_int_equal(loom_events_write(events, &report), LOOM_OK);
    loom_events_close(events);
    assert_int_equal(read_files(folder, files, 1), 1);
    rmdir(folder);
    assert_true(scalar_of_step(files, "loss", &records) == 2.5);
    assert_true(records > 10);
    assert_true(scalar_of_step(files, "expert_load", &records) == 2);
    assert_true(scalar_of_step(files, "dropped_share", &records) == 0.25);
    assert_true(scalar_of_step(files, "load_balancing_loss", &records) == 1.5);
    assert_true(isnan(scalar_of_step(files, "seq_load_balancing_loss", &records)));
    for (int i = 0; i < LAYERS; i++) {
        snprintf(tag, sizeof tag, "moe/load_balancing_loss_layer_%d", i);
        assert_true(scalar_of_step(files, tag, &records) == i);
    }
}

static void a_second_start_has_a_file_of_its_own(void **state) {
    char folder[] = MEGALOOM_BUILD "/events-XXXXXX";
    static file files[3];
    loom_events *events[2];
    (void)state;
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++)
        assert_int_equal(loom_events_open(folder, 1, &events[i]), LOOM_OK);
    for (int i = 0; i < 2; i++)
        loom_events_close(events[i]);
    assert_int_equal(read_files(folder, files, 3), 2);
    rmdir(folder);
}

static void a_folder_that_cannot_be_made_is_named(void **state) {
    loom_events *events = NULL;
    (void)state;
    assert_int_equal(loom_events_open(MEGALOOM_BUILD "/no/such/folder/tensorboard", 1, &events), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "/no/such/folder/tensorboard"));
    assert_null(events);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_decoder_knows_the_checksum_of_the_standard),
        cmocka_unit_test(a_file_has_the_version_a_session_and_the_scalars_of_each_step),
        cmocka_unit_test(the_routers_of_many_layers_are_scalars_of_the_step),
        cmocka_unit_test(a_second_start_has_a_file_of_its_own),
        cmocka_unit_test(a_folder_that_cannot_be_made_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
