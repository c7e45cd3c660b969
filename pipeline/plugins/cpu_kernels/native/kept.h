/* Memory of a pass of linear.c and crosses.c, which each include it once. KEPT: bytes, at most, that a pass leaves to the
   next one. */

#include <sys/mman.h>

#define LARGE (2 << 20) /* bytes of a large page */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Memory that the last pass left: in large pages, since work is laid out at more places than a processor knows the
   addresses of small pages. A pass has it alone; those beside it have memory of their own. */
static struct {
    char *mapped, *memory;
    int64_t bytes;
    int busy;
} kept;

/* Have so many bytes in `kept`, or none. */
static void map_kept(int64_t bytes) {
    char *before = kept.mapped;
    kept.memory = NULL; /* first: another thread may get the same address, and compares what it returns */
    if (before) munmap(before, kept.bytes + LARGE);
    bytes = padded(bytes, LARGE);
    char *mapped = mmap(NULL, bytes + LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    kept.mapped = mapped == MAP_FAILED ? NULL : mapped;
    kept.memory = kept.mapped ? kept.mapped + LARGE - (uintptr_t)kept.mapped % LARGE : NULL;
    kept.bytes = kept.mapped ? bytes : 0;
#ifdef MADV_HUGEPAGE
    if (kept.mapped) madvise(kept.memory, bytes, MADV_HUGEPAGE);
#endif
}

/* So many bytes, of which `room` gives parts; NULL where there are none. */
static char *borrow(int64_t bytes) {
    if (bytes > KEPT || __atomic_exchange_n(&kept.busy, 1, __ATOMIC_ACQUIRE)) return aligned_alloc(64, padded(bytes, 64));
    if (kept.bytes < bytes) map_kept(bytes);
    char *memory = kept.memory; /* another thread's from the release on */
    if (!memory) __atomic_store_n(&kept.busy, 0, __ATOMIC_RELEASE);
    return memory;
}

static void give_back(char *memory, int64_t bytes) {
    if (bytes <= KEPT && memory == kept.memory)
        __atomic_store_n(&kept.busy, 0, __ATOMIC_RELEASE);
    else
        free(memory);
}

/* The next `bytes` of `memory`, of which `*used` are; without memory they are only counted. */
static void *room(char *memory, int64_t *used, int64_t bytes) {
    void *here = memory ? memory + *used : NULL;
    *used += padded(bytes, 64);
    return here;
}
