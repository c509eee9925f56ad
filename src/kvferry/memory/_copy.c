/* Copies a list of memory spans in one call, without the interpreter lock.
 *
 * Three arrays describe the work: target addresses, source addresses, lengths. Nothing is checked
 * here except that the arrays fit each other and no length is negative; addresses come from code
 * that has checked its regions. A source and a target that overlap give undefined bytes, within a
 * span as well as between spans, because order and threads are free.
 *
 * Scattered KV blocks are too short for memcpy's own streaming path, so plain memcpy first reads
 * every target line that it is going to overwrite. The streaming kernels do not: they write past
 * the caches, which also leaves the caches to the model. The other cost of scattered blocks is the
 * start of each one (page walk, no hardware prefetch yet); it is hidden by touching the next
 * block while this one is still being copied.
 */
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define STREAMING 1
#else
#define STREAMING 0
#endif

enum {
    LINE = 64,
    STREAM_BYTES = 1024,        /* shorter spans: memcpy is as fast, and simpler */
    STREAM_BATCH = 1 << 20,     /* smaller batches stay in the cache, where the reader wants them */
    AHEAD = 512,                /* bytes to prefetch ahead inside a span */
    HEAD = 512,                 /* bytes of the next span to prefetch */
    LATE = 4096,                /* how long before the end of a span the next one is touched */
    NEAR = 8,                   /* spans to look ahead while they are short */
    GIL_BYTES = 64 << 10,       /* below, giving up the lock can cost more than the copy */
    GIL_SPANS = 512,
    THREAD_BYTES = 8 << 20,     /* below, starting a thread costs more than it saves */
    PIECE_BYTES = 1 << 20,      /* what a thread takes at a time */
    THREADS_MAX = 16
};

typedef void (*span_copy)(char *target, const char *source, size_t size, const char *next_source,
                          const char *next_target);

struct share {
    const uint64_t *target, *source;
    const int64_t *length;
    Py_ssize_t n, first; /* spans in all; the one this share begins in */
    uint64_t skip, size; /* bytes to leave out of that span; bytes to copy in all */
    span_copy stream;    /* NULL: memcpy only */
};

#if STREAMING
/* One copy loop for each register width: `size` bytes, the target line by line. Partial lines at
 * both ends go through memcpy, which keeps neighbours' bytes. 256 bytes are loaded before they are
 * stored, so that whole lines leave the write-combining buffers. The prefetches may run past the
 * end of a span: a prefetch never faults. */
#define DEFINE_STREAM(NAME, TARGET, VECTOR, LOAD, STORE)                                           \
    __attribute__((target(TARGET))) static void NAME(char *t, const char *s, size_t size,          \
                                                     const char *next_s, const char *next_t)       \
    {                                                                                              \
        enum { WIDTH = sizeof(VECTOR), COUNT = 256 / WIDTH };                                      \
        size_t head = (size_t)(-(uintptr_t)t & (LINE - 1));                                        \
        int touched = 0;                                                                           \
        memcpy(t, s, head);                                                                        \
        t += head, s += head, size -= head;                                                        \
        for (; size >= 256; t += 256, s += 256, size -= 256) {                                     \
            VECTOR v[COUNT];                                                                       \
            if (size > AHEAD)                                                                      \
                for (int i = 0; i < 256; i += LINE)                                                \
                    _mm_prefetch(s + AHEAD + i, _MM_HINT_T0);                                      \
            if (!touched && size <= LATE) {                                                        \
                for (int i = 0; i < HEAD; i += LINE)                                               \
                    _mm_prefetch(next_s + i, _MM_HINT_T0);                                         \
                _mm_prefetch(next_t, _MM_HINT_T0);                                                 \
                touched = 1;                                                                       \
            }                                                                                      \
            for (int i = 0; i < COUNT; i++)                                                        \
                v[i] = LOAD((const void *)(s + i * WIDTH));                                        \
            for (int i = 0; i < COUNT; i++) {                                                      \
                STORE((void *)(t + i * WIDTH), v[i]);                                              \
                __asm__ volatile("" ::: "memory"); /* in order: each line leaves the core whole */ \
            }                                                                                      \
        }                                                                                          \
        memcpy(t, s, size);                                                                        \
    }

DEFINE_STREAM(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_STREAM(stream_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#endif

static const char *const kernel_names[] = {"plain", "avx2", "avx512"};

static int kernel_best(void)
{
#if STREAMING
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
#else
    return 0;
#endif
}

static span_copy kernel_stream(int kernel)
{
#if STREAMING
    return kernel == 2 ? stream_avx512 : kernel == 1 ? stream_avx2 : NULL;
#else
    (void)kernel;
    return NULL;
#endif
}

static void copy_share(const struct share *share)
{
    uint64_t skip = share->skip, left = share->size;

    for (Py_ssize_t i = share->first; left > 0; i++, skip = 0) {
        uint64_t size = (uint64_t)share->length[i] - skip;
        char *target = (char *)(uintptr_t)(share->target[i] + skip);
        const char *source = (const char *)(uintptr_t)(share->source[i] + skip);

        if (size > left)
            size = left;
        left -= size;
        if (share->stream != NULL && size >= STREAM_BYTES) {
            Py_ssize_t next = i + 1 < share->n ? i + 1 : i;
            share->stream(target, source, size, (const char *)(uintptr_t)share->source[next],
                          (const char *)(uintptr_t)share->target[next]);
        } else {
            if (size < STREAM_BYTES && i + NEAR < share->n) {
                const char *near = (const char *)(uintptr_t)share->source[i + NEAR];
                for (uint64_t at = 0; at < size && at < HEAD; at += LINE)
                    __builtin_prefetch(near + at, 0, 3);
                __builtin_prefetch((const char *)(uintptr_t)share->target[i + NEAR], 1, 3);
            }
            memcpy(target, source, size);
        }
    }
#if STREAMING
    if (share->stream != NULL)
        _mm_sfence(); /* streaming stores are seen by other processors only after this */
#endif
}

/* Work that several threads take in pieces. A thread that the system starts late, or not at all,
 * costs nothing: the caller goes on taking pieces, and at the end waits only for those in hand.
 * So the threads are detached and the last one to let go frees the crew. */
struct crew {
    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct share rest; /* what nobody has taken yet */
    int busy, holders;
};

static int crew_take(struct crew *crew, struct share *piece)
{
    struct share *rest = &crew->rest;
    uint64_t size = rest->size < PIECE_BYTES ? rest->size : PIECE_BYTES;

    *piece = *rest;
    piece->size = size;
    rest->size -= size;
    if (rest->size > 0) {
        rest->skip += size;
        while (rest->skip >= (uint64_t)rest->length[rest->first])
            rest->skip -= (uint64_t)rest->length[rest->first++];
    }
    return size > 0;
}

static void crew_work(struct crew *crew)
{
    struct share piece;

    pthread_mutex_lock(&crew->lock);
    crew->busy++;
    while (crew_take(crew, &piece)) {
        pthread_mutex_unlock(&crew->lock);
        copy_share(&piece);
        pthread_mutex_lock(&crew->lock);
    }
    if (--crew->busy == 0)
        pthread_cond_broadcast(&crew->idle);
}

static void crew_leave(struct crew *crew) /* called with the lock held */
{
    int last = --crew->holders == 0;

    pthread_mutex_unlock(&crew->lock);
    if (last) {
        pthread_cond_destroy(&crew->idle);
        pthread_mutex_destroy(&crew->lock);
        free(crew);
    }
}

static void *crew_main(void *crew)
{
    crew_work(crew);
    crew_leave(crew);
    return NULL;
}

static void crew_attributes(pthread_attr_t *attributes)
{
    pthread_attr_init(attributes);
    pthread_attr_setdetachstate(attributes, PTHREAD_CREATE_DETACHED);
#ifdef __linux__
    /* Linux likes to queue a new thread behind its busy parent for a few milliseconds, which is
     * the length of the copy. So it may run on any allowed processor but the caller's. */
    cpu_set_t allowed;
    int here = sched_getcpu();
    if (here >= 0 && here < CPU_SETSIZE && sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        CPU_CLR(here, &allowed);
        if (CPU_COUNT(&allowed) > 0)
            pthread_attr_setaffinity_np(attributes, sizeof allowed, &allowed);
    }
#endif
}

static void copy_parallel(const struct share *whole, int threads)
{
    struct crew *crew = calloc(1, sizeof *crew);
    pthread_attr_t attributes;
    sigset_t all, old;

    if (crew == NULL) {
        copy_share(whole);
        return;
    }
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->idle, NULL);
    crew->rest = *whole;
    crew->holders = threads;
    crew_attributes(&attributes);
    sigfillset(&all); /* signals stay with threads that know what to do with them */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int k = 1; k < threads; k++) {
        pthread_t id;
        if (pthread_create(&id, &attributes, crew_main, crew) != 0) {
            pthread_mutex_lock(&crew->lock);
            crew->holders--;
            pthread_mutex_unlock(&crew->lock);
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    crew_work(crew);
    while (crew->busy > 0)
        pthread_cond_wait(&crew->idle, &crew->lock);
    crew_leave(crew);
}

static const char *copy_checked(const Py_buffer *target, const Py_buffer *source,
                                const Py_buffer *lengths, int threads, int kernel)
{
    struct share whole = {target->buf, source->buf, lengths->buf, lengths->len / 8, 0, 0, 0, NULL};

    if (target->len != lengths->len || source->len != lengths->len || lengths->len % 8 != 0)
        return "the three arrays must hold the same number of 64-bit integers";
    if (kernel < 0)
        kernel = kernel_best();
    else if (kernel > kernel_best())
        return "this processor does not have that copy kernel";
    for (Py_ssize_t i = 0; i < whole.n; i++) {
        if (whole.length[i] < 0)
            return "a length is negative";
        whole.size += (uint64_t)whole.length[i];
    }
    if (whole.size >= STREAM_BATCH)
        whole.stream = kernel_stream(kernel);
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    if (whole.size < GIL_BYTES && whole.n < GIL_SPANS) {
        copy_share(&whole);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (threads > 1 && whole.size >= THREAD_BYTES)
        copy_parallel(&whole, threads);
    else
        copy_share(&whole);
    Py_END_ALLOW_THREADS
    return NULL;
}

static PyObject *py_copy_spans(PyObject *module, PyObject *args)
{
    Py_buffer target, source, lengths;
    int threads, kernel;
    const char *error;

    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*ii", &target, &source, &lengths, &threads, &kernel))
        return NULL;
    error = copy_checked(&target, &source, &lengths, threads, kernel);
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    PyBuffer_Release(&lengths);
    if (error != NULL) {
        PyErr_SetString(PyExc_ValueError, error);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *py_kernels(PyObject *module, PyObject *unused)
{
    int count = kernel_best() + 1;
    PyObject *names = PyTuple_New(count);

    (void)module, (void)unused;
    for (int i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(kernel_names[i]);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0)
            Py_CLEAR(names);
    }
    return names;
}

static PyMethodDef methods[] = {
    {"copy_spans", py_copy_spans, METH_VARARGS,
     "copy_spans(target, source, lengths, threads, kernel): copy lengths[i] bytes from the address "
     "source[i] to target[i], for arrays of 64-bit integers. kernel: index into kernels(), -1 for "
     "the best. Raises ValueError, with nothing copied, when the arrays do not fit each other."},
    {"kernels", py_kernels, METH_NOARGS,
     "kernels(): names of the copy kernels that this processor has, the best one last."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kvferry.memory._copy",
                                        "Copies lists of memory spans.", 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModuleDef_Init(&definition);
}
