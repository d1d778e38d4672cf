/* Memory that is the system's own mapping, on a huge page's border. The invariant: nobody touches pages while a copy is
 * made; reserving stops the thread that does. */
#include "checkpoint/copy.h"
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { HUGE_PAGE = 1 << 21, PAGE = 4096, LINE = 64 };

static void stop_touching(loom__copy_memory *memory) {
    atomic_store_explicit(&memory->enough, true, memory_order_relaxed);
    loom__task_drop(&memory->touch);
}

static void unmap(loom__copy_memory *memory) {
    if (memory->mapping)
        (void)munmap(memory->mapping, memory->mapped);
    memory->data = memory->mapping = NULL;
    memory->bytes = memory->mapped = 0;
}

static bool grow(loom__copy_memory *memory, size_t bytes) {
    if (memory->bytes >= bytes)
        return true;
    size_t wanted = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (wanted < bytes || wanted > SIZE_MAX - HUGE_PAGE)
        return false;
    unmap(memory);                      /* first, so that both are never there at once */
    size_t mapped = wanted + HUGE_PAGE; /* a mapping may begin anywhere */
    void *mapping = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED)
        return false;
    memory->mapping = mapping;
    memory->mapped = mapped;
    memory->data = (char *)mapping + (size_t)(-(uintptr_t)mapping % HUGE_PAGE);
    memory->bytes = wanted;
    (void)madvise(memory->data, wanted, MADV_HUGEPAGE); /* a copy into small pages spends its time on their faults */
    return true;
}

static loom_status touch_pages(void *argument) {
    const loom__copy_memory *memory = argument;
    for (size_t at = 0; at < memory->bytes; at += PAGE) {
        if (atomic_load_explicit(&memory->enough, memory_order_relaxed))
            break;
        ((volatile char *)memory->data)[at] = 0;
    }
    return LOOM_OK;
}

void loom__copy_memory_prepare(loom__copy_memory *memory, const loom_team *team, size_t more) {
    stop_touching(memory);
    if (more == 0 || more > SIZE_MAX - memory->bytes || !grow(memory, memory->bytes + more))
        return;
    atomic_store_explicit(&memory->enough, false, memory_order_relaxed);
    loom__task_start(&memory->touch, team, touch_pages, memory);
}

loom_status loom__copy_memory_reserve(loom__copy_memory *memory, const char *what, size_t bytes) {
    stop_touching(memory);
    if (!grow(memory, bytes))
        return loom_fail(
            LOOM_ERR_MEMORY, "%s: no memory for a copy of %zu bytes, which an asynchronous save makes", what, bytes);
    return LOOM_OK;
}

void loom__copy_memory_free(loom__copy_memory *memory) {
    stop_touching(memory);
    unmap(memory);
}

void loom__copy_past_caches(void *to, const void *from, size_t bytes) {
    size_t at = 0;
#if defined(__x86_64__)
    for (; at + LINE <= bytes; at += LINE) {
        const __m128i *source = (const __m128i *)((const char *)from + at);
        __m128i *target = (__m128i *)((char *)to + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence(); /* another thread reads it, which only knows of ordinary writes */
#endif
    memcpy((char *)to + at, (const char *)from + at, bytes - at);
}
