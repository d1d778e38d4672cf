/* Events of a pipeline as an SVG. One scale for all rows: a mean computation is as wide as its number needs, within the
 * bounds that a page has; a row's band is hatched from the first begin to the last end, and computations lie on it, so
 * that what shows through is the bubble. Colours are classes in a style sheet with a light and a dark form. Coordinates
 * are written as whole hundredths, since printf's decimal point is the locale's. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "report/timeline.h"

enum { MARGIN = 20, LABELS = 70, SHARES = 58, NARROWEST = 620, WIDEST = 3600, MEAN_WIDTH = 30, SWATCH = 24 };
enum { SMALLEST_FONT = 9, CHUNKS_IN_LEGEND = 16, MANY_STAGES = 16 };

typedef struct family {
    const char *name, *letter;
    unsigned char dark[3], light[3]; /* of the first chunk, of the last one */
} family;

enum { FORWARD, BACKWARD, INPUT, WEIGHT, FAMILIES };
static const family families[FAMILIES] = {
    [FORWARD] = {"forward", "f", {0x1f, 0x5f, 0xbf}, {0xa9, 0xcd, 0xf7}},
    [BACKWARD] = {"backward", "b", {0x1a, 0x7a, 0x48}, {0xa4, 0xe0, 0xbc}},
    [INPUT] = {"backward, input half", "i", {0x1a, 0x7a, 0x48}, {0xa4, 0xe0, 0xbc}},
    [WEIGHT] = {"weight half", "w", {0xc2, 0x63, 0x0a}, {0xff, 0xd3, 0x91}},
};

typedef struct drawing {
    FILE *out;
    const loom_timeline *timeline;
    loom__timeline_extent extent;
    double scale; /* pixels a unit of time */
    double span;  /* pixels of all */
    int64_t chunks;
    int row, pitch, font, top;
    bool used[FAMILIES];
    bool numbered[FAMILIES]; /* a mean one has room for the longest number */
} drawing;

static int family_of(loom_instruction_kind kind) {
    switch (kind) {
    case LOOM_INSTRUCTION_FORWARD:
        return FORWARD;
    case LOOM_INSTRUCTION_BACKWARD_INPUT:
        return INPUT;
    case LOOM_INSTRUCTION_BACKWARD_WEIGHT:
        return WEIGHT;
    default:
        return BACKWARD;
    }
}

loom_status loom__timeline_check(const loom_timeline *timeline, loom__timeline_extent *extent) {
    loom__timeline_extent e = {0};
    double busy = 0.0;
    for (int64_t i = 0; i < timeline->event_count; i++) {
        const loom_schedule_event *at = &timeline->events[i];
        if (at->stage < 0 || at->stage >= timeline->stages || at->chunk < 0 ||
            at->chunk >= (timeline->chunks > 0 ? timeline->chunks : 1) ||
            (unsigned)at->kind >= LOOM_INSTRUCTION_KINDS || !isfinite(at->start) || !isfinite(at->end) ||
            at->end < at->start)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "event %" PRId64 " (%s of stage %" PRId64
                ", chunk %d, from %g to %g) does not fit a timeline of %" PRId64 " stages and %" PRId64
                " chunks: expected a stage and chunk of it, and an end not before the begin",
                i, loom_instruction_name(at->kind), at->stage, at->chunk, at->start, at->end, timeline->stages,
                timeline->chunks);
        e.begin = i == 0 || at->start < e.begin ? at->start : e.begin;
        e.end = i == 0 || at->end > e.end ? at->end : e.end;
        if (loom_instruction_computes(at->kind)) {
            e.computations++;
            busy += at->end - at->start;
        }
    }
    if (e.computations > 0)
        e.mean = busy / (double)e.computations;
    *extent = e;
    return LOOM_OK;
}

double loom_timeline_bubble(const loom_timeline *timeline) {
    loom__timeline_extent e;
    if (timeline->stages < 1 || loom__timeline_check(timeline, &e) || e.computations == 0 || !(e.end > e.begin))
        return 0.0;
    return 1.0 - e.mean * (double)e.computations / ((double)timeline->stages * (e.end - e.begin));
}

/* " name='12.34'" */
static void put_length(const drawing *d, const char *name, double pixels) {
    int64_t hundredths = llround(pixels * 100.0);
    fprintf(d->out, " %s=\"%" PRId64 ".%02d\"", name, hundredths / 100, (int)(hundredths % 100));
}

static void put_text(const drawing *d, double x, double y, const char *class, const char *anchor) {
    fputs("<text", d->out);
    put_length(d, "x", x);
    put_length(d, "y", y);
    fprintf(d->out, " class=\"%s\" text-anchor=\"%s\">", class, anchor);
}

static void put_escaped(const drawing *d, const char *text) {
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", d->out);
        else if (*text == '&')
            fputs("&amp;", d->out);
        else
            fputc(*text, d->out);
    }
}

static void put_percent(const drawing *d, double share) {
    int64_t tenths = llround(share * 1000.0);
    fprintf(d->out, "%" PRId64 ".%d %%", tenths / 10, (int)(tenths % 10));
}

/* Evenly from dark to light; a single chunk is rather dark. True: white numbers are read better on it. */
static bool colour_of(const family *f, int64_t chunk, int64_t chunks, int rgb[3]) {
    double t = chunks > 1 ? (double)chunk / (double)(chunks - 1) : 0.15, light = 0.0;
    static const double weight[3] = {0.2126, 0.7152, 0.0722};
    for (int i = 0; i < 3; i++) {
        rgb[i] = (int)lround(f->dark[i] + t * (f->light[i] - f->dark[i]));
        light += weight[i] * rgb[i] / 255.0;
    }
    return light < 0.52;
}

static void put_style(const drawing *d) {
    fprintf(d->out,
        "<style>\n"
        "text{font:%dpx system-ui,-apple-system,\"Segoe UI\",\"DejaVu Sans\",sans-serif;fill:#1f2328}\n"
        ".title{font-size:17px;font-weight:600}.soft{fill:#59636e;font-size:12px}.label{font-size:12px}\n"
        ".page{fill:#fff}.line{stroke:#d0d7de}.ground{fill:#eef1f4}.hatch{stroke:#c3cbd3}\n"
        ".cell{stroke:#fff;stroke-width:%s}.white{fill:#fff}.black{fill:#10151b}.bare{stroke:none}\n"
        "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.page{fill:#0d1117}\n"
        ".line{stroke:#30363d}.ground{fill:#1a2027}.hatch{stroke:#3a434d}.cell{stroke:#0d1117}\n"
        ".white{fill:#fff}.black{fill:#10151b}}\n",
        d->font, d->extent.mean * d->scale < 8.0 ? "0.3" : "1");
    for (int f = 0; f < FAMILIES; f++)
        for (int64_t chunk = 0; d->used[f] && chunk < d->chunks; chunk++) {
            int rgb[3];
            (void)colour_of(&families[f], chunk, d->chunks, rgb);
            fprintf(d->out, ".%s%" PRId64 "{fill:#%02x%02x%02x}\n", families[f].letter, chunk, (unsigned)rgb[0],
                (unsigned)rgb[1], (unsigned)rgb[2]);
        }
    fputs("</style>\n<defs><pattern id=\"idle\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><rect width=\"7\" height=\"7\" class=\"ground\"/>"
          "<path d=\"M0 0V7\" class=\"hatch\" stroke-width=\"2\"/></pattern></defs>\n",
        d->out);
}

static void put_box(const drawing *d, double x, double y, double width, double height, const char *attributes) {
    fputs("<rect", d->out);
    put_length(d, "x", x);
    put_length(d, "y", y);
    put_length(d, "width", width);
    put_length(d, "height", height);
    fprintf(d->out, " %s/>", attributes);
}

static double row_top(const drawing *d, int64_t stage) {
    return d->top + (double)stage * d->pitch;
}

static void put_rows(const drawing *d, const double *busy) {
    for (int64_t stage = 0; stage < d->timeline->stages; stage++) {
        double top = row_top(d, stage), middle = top + d->row / 2.0 + 12 * 0.35,
               length = d->extent.end - d->extent.begin;
        put_text(d, MARGIN + LABELS - 10, middle, "label", "end");
        fprintf(d->out, "stage %" PRId64 "</text>", stage);
        put_box(d, MARGIN + LABELS, top, d->span, d->row, "fill=\"url(#idle)\"");
        put_text(d, MARGIN + LABELS + d->span + SHARES, middle, "soft", "end");
        put_percent(d, length > 0.0 ? 1.0 - busy[stage] / length : 0.0);
        fputs("</text>\n", d->out);
    }
}

static double number_width(int digits, int font) {
    return digits * font * 0.62 + 2.0;
}

static void put_event(const drawing *d, const loom_schedule_event *at) {
    const family *f = &families[family_of(at->kind)];
    double x = MARGIN + LABELS + (at->start - d->extent.begin) * d->scale, width = (at->end - at->start) * d->scale;
    double top = row_top(d, at->stage);
    char attributes[64], number[32];
    int rgb[3], digits = snprintf(number, sizeof number, "%" PRId64, at->microbatch);
    bool white = colour_of(f, at->chunk, d->chunks, rgb);
    snprintf(attributes, sizeof attributes, "rx=\"2\" class=\"cell %s%d\"", f->letter, at->chunk);
    fprintf(
        d->out, "<g><title>stage %" PRId64 ": %s of microbatch %s", at->stage, loom_instruction_name(at->kind), number);
    if (d->chunks > 1)
        fprintf(d->out, ", chunk %d", at->chunk);
    fputs("</title>", d->out);
    put_box(d, x, top, width, d->row, attributes);
    if (d->numbered[family_of(at->kind)] && width >= number_width(digits, d->font)) {
        put_text(d, x + width / 2, top + d->row / 2.0 + d->font * 0.35, white ? "white" : "black", "middle");
        fprintf(d->out, "%s</text>", number);
    }
    fputs("</g>\n", d->out);
}

/* Every 1, 2 or 5 times a power of ten, about 90 pixels apart. */
static void put_axis(const drawing *d, double y) {
    double length = d->extent.end - d->extent.begin;
    if (!(length > 0.0))
        return;
    double wanted = 90.0 / d->scale, power = floor(log10(wanted));
    int exponent = (int)power, digit = wanted > 5.0 * pow(10.0, power) ? 10 : wanted > 2.0 * pow(10.0, power) ? 5 : 2;
    double step = digit * pow(10.0, power);
    if (exponent < -15)
        return;
    for (int64_t i = 0; (double)i * step <= length * (1.0 + 1e-9); i++) {
        double x = MARGIN + LABELS + (double)i * step * d->scale;
        fputs("<path class=\"line\" d=\"M", d->out);
        fprintf(d->out, "%.0f %.0fv5\"/>", x, y);
        put_text(d, x, y + 18, "soft", "middle");
        int64_t value = i * digit, unit = 1;
        for (int e = exponent; e < 0; e++)
            unit *= 10;
        if (exponent >= 0)
            fprintf(d->out, "%.0f</text>", (double)i * step);
        else if (value % unit == 0)
            fprintf(d->out, "%" PRId64 "</text>", value / unit);
        else
            fprintf(d->out, "%" PRId64 ".%0*" PRId64 "</text>", value / unit, -exponent, value % unit);
    }
    if (d->timeline->unit) {
        put_text(d, MARGIN + LABELS + d->span + SHARES, y + 18, "soft", "end");
        put_escaped(d, d->timeline->unit);
        fputs("</text>", d->out);
    }
    fputc('\n', d->out);
}

static double text_width(const char *text) {
    return (double)strlen(text) * 6.8;
}

/* Swatches of one family, one for each chunk. Draws nothing without `draw`: the height is asked for first. */
static void put_legend_item(const drawing *d, int f, double *x, double *y, bool draw) {
    int64_t swatches = d->chunks < CHUNKS_IN_LEGEND ? d->chunks : CHUNKS_IN_LEGEND;
    double right = MARGIN + LABELS + d->span + SHARES;
    char name[64] = "bubble 100.0 %";
    if (f < FAMILIES)
        snprintf(name, sizeof name, "%s%s", families[f].name,
            d->chunks > CHUNKS_IN_LEGEND ? ", chunks 0, 1, …"
            : d->chunks > 1              ? ", by chunk"
                                         : "");
    else
        swatches = 1;
    double width = (double)swatches * SWATCH + 6 + text_width(name) + 18;
    if (*x + width > right && *x > MARGIN) {
        *x = MARGIN;
        *y += 26;
    }
    for (int64_t chunk = 0; draw && chunk < swatches; chunk++) {
        char attributes[64];
        int rgb[3];
        if (f == FAMILIES)
            snprintf(attributes, sizeof attributes, "fill=\"url(#idle)\"");
        else
            snprintf(attributes, sizeof attributes, "rx=\"2\" class=\"cell %s%" PRId64 "\"", families[f].letter, chunk);
        put_box(d, *x + (double)chunk * SWATCH, *y, SWATCH, 18, attributes);
        if (f < FAMILIES && d->chunks > 1) {
            bool white = colour_of(&families[f], chunk, d->chunks, rgb);
            put_text(d, *x + ((double)chunk + 0.5) * SWATCH, *y + 13, white ? "white" : "black", "middle");
            fprintf(d->out, "%" PRId64 "</text>", chunk);
        }
    }
    if (draw) {
        put_text(d, *x + (double)swatches * SWATCH + 6, *y + 13, "label", "start");
        if (f == FAMILIES) {
            fputs("bubble ", d->out);
            put_percent(d, loom_timeline_bubble(d->timeline));
        } else {
            fputs(name, d->out);
        }
        fputs("</text>\n", d->out);
    }
    *x += width;
}

static double put_legend(const drawing *d, double y, bool draw) {
    double x = MARGIN;
    for (int f = 0; f <= FAMILIES; f++)
        if (f == FAMILIES || d->used[f])
            put_legend_item(d, f, &x, &y, draw);
    return y + 18;
}

static void measure(drawing *d) {
    double length = d->extent.end - d->extent.begin;
    d->chunks = d->timeline->chunks > 1 ? d->timeline->chunks : 1;
    d->span = d->extent.mean > 0.0 ? length / d->extent.mean * MEAN_WIDTH : NARROWEST;
    if (d->span < NARROWEST)
        d->span = NARROWEST;
    if (d->span > WIDEST)
        d->span = WIDEST;
    d->scale = length > 0.0 ? d->span / length : 1.0;
    d->row = d->timeline->stages > MANY_STAGES ? 18 : 30;
    d->pitch = d->row + (d->timeline->stages > MANY_STAGES ? 3 : 6);
    d->font = d->timeline->stages > MANY_STAGES ? 10 : 12;
    d->top = MARGIN + (d->timeline->title ? 36 : 0) + 18;
    int64_t largest = 0, counts[FAMILIES] = {0};
    double widths[FAMILIES] = {0};
    for (int64_t i = 0; i < d->timeline->event_count; i++) {
        const loom_schedule_event *at = &d->timeline->events[i];
        if (!loom_instruction_computes(at->kind))
            continue;
        counts[family_of(at->kind)]++;
        widths[family_of(at->kind)] += (at->end - at->start) * d->scale;
        largest = at->microbatch > largest ? at->microbatch : largest;
    }
    int digits = snprintf(NULL, 0, "%" PRId64, largest);
    double narrowest = INFINITY;
    for (int f = 0; f < FAMILIES; f++) {
        d->used[f] = counts[f] > 0;
        if (d->used[f])
            narrowest = fmin(narrowest, widths[f] / (double)counts[f]);
    }
    while (d->font > SMALLEST_FONT && narrowest < number_width(digits, d->font))
        d->font--;
    for (int f = 0; f < FAMILIES; f++)
        d->numbered[f] = d->used[f] && widths[f] / (double)counts[f] >= number_width(digits, d->font);
}

static void draw(const drawing *d, const double *busy) {
    double bottom = row_top(d, d->timeline->stages), width = 2 * MARGIN + LABELS + d->span + SHARES;
    double height = put_legend(d, bottom + 40, false) + MARGIN;
    fprintf(d->out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\">\n",
        ceil(width), ceil(height), ceil(width), ceil(height));
    put_style(d);
    fputs("<rect width=\"100%\" height=\"100%\" class=\"page\"/>\n", d->out);
    if (d->timeline->title) {
        put_text(d, MARGIN, MARGIN + 16, "title", "start");
        put_escaped(d, d->timeline->title);
        fputs("</text>\n", d->out);
    }
    put_text(d, MARGIN + LABELS + d->span + SHARES, d->top - 8, "soft", "end");
    fputs("idle</text>\n", d->out);
    put_rows(d, busy);
    for (int64_t i = 0; i < d->timeline->event_count; i++)
        if (loom_instruction_computes(d->timeline->events[i].kind))
            put_event(d, &d->timeline->events[i]);
    put_axis(d, bottom);
    (void)put_legend(d, bottom + 40, true);
    fputs("</svg>\n", d->out);
}

loom_status loom_timeline_write_svg(FILE *out, const loom_timeline *timeline) {
    drawing d = {.out = out, .timeline = timeline};
    LOOM_TRY(loom__timeline_check(timeline, &d.extent));
    if (timeline->stages < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "a timeline of %" PRId64 " stages: expected at least 1", timeline->stages);
    double *busy = calloc((size_t)timeline->stages, sizeof *busy);
    if (!busy)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a timeline of %" PRId64 " stages", timeline->stages);
    for (int64_t i = 0; i < timeline->event_count; i++)
        if (loom_instruction_computes(timeline->events[i].kind))
            busy[timeline->events[i].stage] += timeline->events[i].end - timeline->events[i].start;
    measure(&d);
    draw(&d, busy);
    free(busy);
    return ferror(out) ? loom_fail(LOOM_ERR_IO, "the picture of the timeline cannot be written: %m") : LOOM_OK;
}
