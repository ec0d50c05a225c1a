// Counts what malloc has handed out: preload it, and every thread and library of the process is seen, exactly.
// torch's profiler sees one thread: what a thread of gloo frees looks as if it lived for ever, what it takes is unseen.
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_memalign(size_t, size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), __libc_free(void *);

static atomic_long live, top;

static void *taken(void *p) {
    if (p) {
        long size = (long)malloc_usable_size(p), now = atomic_fetch_add(&live, size) + size, seen = atomic_load(&top);
        while (now > seen && !atomic_compare_exchange_weak(&top, &seen, now)) {}
    }
    return p;
}

static void given_back(void *p) {
    if (p) atomic_fetch_sub(&live, (long)malloc_usable_size(p));
}

void *malloc(size_t n) { return taken(__libc_malloc(n)); }
void *calloc(size_t count, size_t n) { return taken(__libc_calloc(count, n)); }
void *memalign(size_t to, size_t n) { return taken(__libc_memalign(to, n)); }
void *aligned_alloc(size_t to, size_t n) { return taken(__libc_memalign(to, n)); }

int posix_memalign(void **out, size_t to, size_t n) {
    void *p = __libc_memalign(to, n);
    if (!p && n) return ENOMEM;
    *out = taken(p);
    return 0;
}

void *realloc(void *p, size_t n) {
    given_back(p);
    void *moved = __libc_realloc(p, n);
    if (!moved && n) taken(p);
    return taken(moved);
}

void free(void *p) {
    given_back(p);
    __libc_free(p);
}

long heap_live(void) { return atomic_load(&live); }
long heap_top(void) { return atomic_load(&top); }
void heap_reset(void) { atomic_store(&top, atomic_load(&live)); }
