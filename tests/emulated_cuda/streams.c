/* Streams and events. Each stream has a thread, so that streams overtake each other, and work waits a random while
 * (EMULATED_CUDA_DELAY_US at most) before it runs: what is read or reused before its event has passed is seen wrong. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulated.h"

enum kind { COPIES, KERNEL, RECORD, WAIT, END };
struct event { uint64_t recorded, reached; CUresult result; bool is_destroyed, is_untimed; struct timespec at; };
struct work {
    enum kind kind;
    struct piece *pieces;
    size_t count;
    struct launch *launch;
    CUevent event;
    uint64_t number;
    struct work *next;
};
struct graph { struct work *first; };
struct stream {
    int device;
    pthread_t thread;
    struct work *first, *last; /* `first` stays in place while it runs */
    struct stream *next;
    struct work *captured, *captured_last;
    bool is_capturing;
    int capture_mode;
    unsigned seed, number; /* from 1, in the order in which streams were made */
};

static struct stream *streams;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* of anything here */

#define ENTER(name) do { CUresult met = enter_context(name); if (met) return met; } while (0)

static bool is_known(CUstream stream) {
    for (struct stream *each = streams; each; each = each->next)
        if (each == stream)
            return true;
    return false;
}

static bool overlaps(uint64_t a, size_t a_bytes, uint64_t b, size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

bool is_pending(uint64_t address, size_t nbytes) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct work *work = stream->first; work; work = work->next)
            for (size_t i = 0; work->kind == COPIES && i < work->count; i++)
                if (overlaps(address, nbytes, work->pieces[i].to, work->pieces[i].nbytes) ||
                    overlaps(address, nbytes, work->pieces[i].from, work->pieces[i].nbytes))
                    return true;
    return false;
}

bool is_kernel_pending(int device) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct work *work = stream->device == device ? stream->first : NULL; work; work = work->next)
            if (work->kind == KERNEL)
                return true;
    return false;
}

static void run_on_device(struct stream *stream, const struct work *work) {
    long most_us = setting("EMULATED_CUDA_DELAY_US", 200);
    if (most_us > 0)
        usleep((useconds_t)(rand_r(&stream->seed) % (most_us + 1)));
    char own[16];
    snprintf(own, sizeof own, "run%u", stream->number);
    CUresult result = broken(stream->device) ? broken(stream->device) : enter("run");
    bool spoils = result == SPOIL;
    if (!result || spoils)
        result = enter(own);
    for (size_t i = 0; i < work->count && !result; i++) /* in no promised order: the last first */
        result = run_copy(stream->device, &work->pieces[work->count - 1 - i]);
    for (size_t i = 0; spoils && i < work->count; i++)
        spoil(stream->device, &work->pieces[i]);
    if (work->kind == KERNEL && !result)
        result = run_kernel(stream->device, work->launch);
    if (result)
        break_context(stream->device, result);
}

static void *serve(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&emulated_lock);
    for (;;) {
        while (!stream->first)
            pthread_cond_wait(&changed, &emulated_lock);
        struct work *work = stream->first;
        if (work->kind == COPIES || work->kind == KERNEL) {
            pthread_mutex_unlock(&emulated_lock);
            run_on_device(stream, work);
            pthread_mutex_lock(&emulated_lock);
        } else if (work->kind == RECORD) {
            if (work->event->reached < work->number)
                work->event->reached = work->number;
            clock_gettime(CLOCK_MONOTONIC, &work->event->at);
            work->event->result = broken(stream->device);
        } else if (work->kind == WAIT) {
            while (work->event->reached < work->number)
                pthread_cond_wait(&changed, &emulated_lock);
        }
        stream->first = work->next;
        stream->last = stream->first ? stream->last : NULL;
        bool is_end = work->kind == END;
        free(work->pieces);
        free(work->launch);
        free(work);
        pthread_cond_broadcast(&changed);
        if (is_end)
            break;
    }
    for (struct stream **place = &streams; *place; place = &(*place)->next)
        if (*place == stream) {
            *place = stream->next;
            break;
        }
    pthread_mutex_unlock(&emulated_lock);
    free(stream);
    return NULL;
}

/* The legacy stream (NULL) is not there: it waits for all others, which none of our code means to do. */
static CUresult add(CUstream stream, struct work work) {
    CUresult result = INVALID_HANDLE;
    pthread_mutex_lock(&emulated_lock);
    if (is_known(stream) && stream->is_capturing) {
        result = NOT_SUPPORTED;
        if (work.kind == COPIES || work.kind == KERNEL) {
            struct work *own = malloc(sizeof work);
            *own = work;
            *(stream->captured_last ? &stream->captured_last->next : &stream->captured) = own;
            stream->captured_last = own;
            result = SUCCESS;
        }
    } else if (is_known(stream)) {
        struct work *own = malloc(sizeof work);
        if (work.kind == RECORD)
            work.number = ++work.event->recorded;
        if (work.kind == WAIT)
            work.number = work.event->recorded;
        *own = work;
        for (size_t i = 0; work.kind == COPIES && i < work.count; i++)
            poison(stream->device, &work.pieces[i]);
        if (stream->last)
            stream->last->next = own;
        else
            stream->first = own;
        stream->last = own;
        pthread_cond_broadcast(&changed);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&emulated_lock);
    if (result)
        free(work.pieces), free(work.launch);
    return result;
}

CUresult enqueue_copies(CUstream stream, struct piece *pieces, size_t count) {
    return add(stream, (struct work){.kind = COPIES, .pieces = pieces, .count = count});
}

CUresult enqueue_kernel(CUstream stream, struct launch *launch) {
    return add(stream, (struct work){.kind = KERNEL, .launch = launch});
}

EXPORTED CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER("cuStreamCreate");
    if (flags > 1)
        return INVALID_VALUE;
    static unsigned made;
    struct stream *own = calloc(1, sizeof *own);
    own->device = current_device();
    pthread_mutex_lock(&emulated_lock);
    own->number = ++made;
    own->seed = (unsigned)setting("EMULATED_CUDA_SEED", 1) + made - 1;
    own->next = streams;
    streams = own;
    pthread_mutex_unlock(&emulated_lock);
    pthread_create(&own->thread, NULL, serve, own);
    pthread_detach(own->thread);
    *stream = own;
    return SUCCESS;
}

/* Work on a stream has a thread of its own here: none comes before another's. */
EXPORTED CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    (void)priority; /* one outside of the range counts as its end */
    return cuStreamCreate(stream, flags);
}

EXPORTED CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER("cuStreamDestroy");
    return add(stream, (struct work){.kind = END});
}

EXPORTED CUresult cuStreamQuery(CUstream stream) {
    ENTER("cuStreamQuery");
    pthread_mutex_lock(&emulated_lock);
    CUresult result = !is_known(stream) ? INVALID_HANDLE : stream->first ? NOT_READY : broken(stream->device);
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuStreamSynchronize(CUstream stream) {
    ENTER("cuStreamSynchronize");
    pthread_mutex_lock(&emulated_lock);
    CUresult result = INVALID_HANDLE;
    if (is_known(stream)) {
        int device = stream->device;
        if (stream->is_capturing) {
            pthread_mutex_unlock(&emulated_lock);
            return CAPTURE_UNSUPPORTED;
        }
        while (is_known(stream) && stream->first)
            pthread_cond_wait(&changed, &emulated_lock);
        result = broken(device);
    }
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize");
    int device = current_device();
    pthread_mutex_lock(&emulated_lock);
    for (struct stream *each = streams; each;)
        if (each->device == device && each->first) {
            pthread_cond_wait(&changed, &emulated_lock);
            each = streams; /* it may be gone */
        } else {
            each = each->next;
        }
    CUresult result = broken(device);
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

/* Graphs: what a stream captured, copies and kernels alone, in their order. They are never freed. */
EXPORTED CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    ENTER("cuStreamBeginCapture");
    pthread_mutex_lock(&emulated_lock);
    CUresult result = !is_known(stream) ? INVALID_HANDLE : stream->is_capturing || mode < 0 || mode > 2 ? INVALID_VALUE : 0;
    if (!result) {
        stream->is_capturing = true;
        stream->capture_mode = mode;
        capture_begun(mode);
    }
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER("cuStreamEndCapture");
    pthread_mutex_lock(&emulated_lock);
    CUresult result = is_known(stream) && stream->is_capturing ? SUCCESS : INVALID_VALUE;
    if (!result) {
        *graph = malloc(sizeof **graph);
        (*graph)->first = stream->captured;
        stream->captured = stream->captured_last = NULL;
        stream->is_capturing = false;
        if (!capture_ended(stream->capture_mode))
            result = CAPTURE_INVALIDATED;
    }
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuGraphInstantiateWithFlags(CUgraph *executable, CUgraph graph, unsigned long long flags) {
    ENTER("cuGraphInstantiate");
    *executable = graph;
    return flags ? NOT_SUPPORTED : SUCCESS;
}

EXPORTED CUresult cuGraphLaunch(CUgraph graph, CUstream stream) {
    ENTER("cuGraphLaunch");
    CUresult result = SUCCESS;
    for (struct work *each = graph->first; each && !result; each = each->next) {
        struct work own = *each;
        own.next = NULL;
        if (each->pieces)
            own.pieces = memcpy(malloc(each->count * sizeof *own.pieces), each->pieces, each->count * sizeof *own.pieces);
        if (each->launch)
            own.launch = memcpy(malloc(sizeof *own.launch), each->launch, sizeof *own.launch);
        result = add(stream, own);
    }
    return result;
}

EXPORTED CUresult cuGraphExecDestroy(CUgraph graph) {
    ENTER("cuGraphExecDestroy");
    return graph ? SUCCESS : INVALID_HANDLE;
}

EXPORTED CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER("cuStreamWaitEvent");
    return flags || event->is_destroyed ? INVALID_VALUE : add(stream, (struct work){.kind = WAIT, .event = event});
}

EXPORTED CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER("cuEventCreate");
    if (flags & ~3U)
        return NOT_SUPPORTED; /* between processes: not emulated */
    *event = calloc(1, sizeof **event);
    (*event)->is_untimed = flags & 2;
    return SUCCESS;
}

/* Its memory stays: a thread may still wait for it, and use after destruction is to be seen, not to crash. */
EXPORTED CUresult cuEventDestroy_v2(CUevent event) {
    ENTER("cuEventDestroy");
    if (event->is_destroyed)
        return INVALID_HANDLE;
    event->is_destroyed = true;
    return SUCCESS;
}

EXPORTED CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER("cuEventRecord");
    return event->is_destroyed ? INVALID_HANDLE : add(stream, (struct work){.kind = RECORD, .event = event});
}

EXPORTED CUresult cuEventQuery(CUevent event) {
    ENTER("cuEventQuery");
    pthread_mutex_lock(&emulated_lock);
    CUresult result = event->is_destroyed ? INVALID_HANDLE : event->reached < event->recorded ? NOT_READY : event->result;
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuEventSynchronize(CUevent event) {
    ENTER("cuEventSynchronize");
    pthread_mutex_lock(&emulated_lock);
    while (!event->is_destroyed && event->reached < event->recorded)
        pthread_cond_wait(&changed, &emulated_lock);
    CUresult result = event->is_destroyed ? INVALID_HANDLE : event->result;
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    ENTER("cuEventElapsedTime");
    CUresult result = SUCCESS;
    pthread_mutex_lock(&emulated_lock);
    CUevent both[] = {start, end};
    for (int i = 0; i < 2 && !result; i++)
        result = both[i]->is_destroyed || both[i]->is_untimed || !both[i]->recorded ? INVALID_HANDLE
                 : both[i]->reached < both[i]->recorded                             ? NOT_READY
                                                                                    : both[i]->result;
    if (!result)
        *milliseconds = (float)((double)(end->at.tv_sec - start->at.tv_sec) * 1e3 +
                                (double)(end->at.tv_nsec - start->at.tv_nsec) / 1e6);
    pthread_mutex_unlock(&emulated_lock);
    return result;
}
