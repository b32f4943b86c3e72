/* The copy calls, and the copy itself, which a stream's thread runs later. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

/* What one side of a copy is: checked when the call is made (host memory) and again when it runs (both). */
static CUresult check(uint64_t address, size_t nbytes, int right) {
    return device_range(address, nbytes) ? SUCCESS : host_range(address, nbytes, right);
}

static CUresult submit(CUstream stream, const struct piece *pieces, size_t count) {
    struct piece *own = malloc((count ? count : 1) * sizeof *own);
    CUresult result = SUCCESS;
    pthread_mutex_lock(&emulated_lock);
    for (size_t i = 0; i < count && !result; i++) {
        own[i] = pieces[i];
        result = check(own[i].to, own[i].nbytes, RIGHT_WRITE);
        result = result ? result : check(own[i].from, own[i].nbytes, RIGHT_READ);
        if (!result && own[i].to < own[i].from + own[i].nbytes && own[i].from < own[i].to + own[i].nbytes)
            result = INVALID_VALUE; /* undefined on hardware */
    }
    for (size_t i = 0; i < count && !result; i++) {
        bool to_device = device_range(own[i].to, own[i].nbytes);
        if (!to_device || !device_range(own[i].from, own[i].nbytes))
            note_copy(to_device ? own[i].from : own[i].to, own[i].nbytes, to_device);
    }
    pthread_mutex_unlock(&emulated_lock);
    if (!result)
        return enqueue_copies(stream, own, count);
    free(own);
    return result;
}

static CUresult one(const char *name, CUstream stream, uint64_t to, uint64_t from, size_t nbytes, int device_sides) {
    CUresult result = enter_context(name);
    if (result)
        return result;
    pthread_mutex_lock(&emulated_lock);
    bool to_device = device_range(to, nbytes), from_device = device_range(from, nbytes);
    pthread_mutex_unlock(&emulated_lock);
    if (device_sides != (to_device ? 2 : 0) + (from_device ? 1 : 0))
        return INVALID_VALUE;
    struct piece piece = {to, from, nbytes};
    return submit(stream, &piece, nbytes ? 1 : 0);
}

EXPORTED CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    return one("cuMemcpyHtoDAsync", stream, to, (uint64_t)from, nbytes, 2);
}

EXPORTED CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    return one("cuMemcpyDtoHAsync", stream, (uint64_t)to, from, nbytes, 1);
}

EXPORTED CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    return one("cuMemcpyDtoDAsync", stream, to, from, nbytes, 3);
}

/* To nothing but zeros: a piece that comes from address 0. */
EXPORTED CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
    CUresult result = enter_context("cuMemsetD8Async");
    if (result)
        return result;
    pthread_mutex_lock(&emulated_lock);
    bool is_device = device_range(to, nbytes);
    pthread_mutex_unlock(&emulated_lock);
    if (!is_device || !nbytes)
        return INVALID_VALUE;
    if (value)
        return NOT_SUPPORTED;
    struct piece *own = malloc(sizeof *own);
    *own = (struct piece){to, 0, nbytes};
    return enqueue_copies(stream, own, 1);
}

EXPORTED CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *nbytes,
                                        size_t count, const CUmemcpyAttributes *attributes, const size_t *first,
                                        size_t attribute_count, CUstream stream) {
    CUresult result = enter_context("cuMemcpyBatchAsync");
    if (result)
        return result;
    if (!count || !attribute_count || attribute_count > count || first[0] != 0)
        return INVALID_VALUE;
    for (size_t i = 0; i < attribute_count; i++)
        if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3 || (i && first[i] <= first[i - 1]))
            return INVALID_VALUE;
    struct piece *pieces = malloc(count * sizeof *pieces);
    for (size_t i = 0; i < count; i++) {
        pieces[i] = (struct piece){to[i], from[i], nbytes[i]};
        if (!nbytes[i])
            result = INVALID_VALUE;
    }
    result = result ? result : submit(stream, pieces, count);
    free(pieces);
    return result;
}

/* Until CUDA 13. */
EXPORTED CUresult cuMemcpyBatchAsync(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *nbytes, size_t count,
                                     const CUmemcpyAttributes *attributes, const size_t *first, size_t attribute_count,
                                     size_t *failed, CUstream stream) {
    if (!failed)
        return INVALID_VALUE;
    *failed = SIZE_MAX; /* no single copy is to blame */
    return cuMemcpyBatchAsync_v2(to, from, nbytes, count, attributes, first, attribute_count, stream);
}

static CUresult side(int device, uint64_t address, size_t nbytes, int right, char **at, size_t *upto) {
    if (device_range(address, 1))
        return resolve(device, address, nbytes, right, at, upto);
    *at = (char *)address;
    *upto = nbytes;
    return host_range(address, nbytes, right) ? ILLEGAL_ADDRESS : SUCCESS;
}

/* What a copy will write is undefined until it has run. Left alone: memory that work which was queued before it may still
 * read, and what this copy has no right to, which it finds itself when it runs. */
void poison(int device, const struct piece *piece) {
    bool is_device = device_range(piece->to, 1);
    if (is_pending(piece->to, piece->nbytes) || (is_device && is_kernel_pending(device)))
        return;
    for (size_t done = 0, step; done < piece->nbytes; done += step) {
        uint64_t at = piece->to + done;
        char *to;
        if ((is_device && !is_mapped(device, at, RIGHT_WRITE)) ||
            side(device, at, piece->nbytes - done, RIGHT_WRITE, &to, &step))
            return;
        memset(to, POISON, step);
    }
}

void spoil(int device, const struct piece *piece) {
    char *last;
    size_t upto;
    pthread_mutex_lock(&emulated_lock);
    if (!side(device, piece->to + piece->nbytes - 1, 1, RIGHT_WRITE, &last, &upto))
        *last ^= 1;
    pthread_mutex_unlock(&emulated_lock);
}

CUresult run_copy(int device, const struct piece *piece) {
    for (size_t done = 0, step; done < piece->nbytes; done += step) {
        char *to, *from;
        size_t to_upto, from_upto, left = piece->nbytes - done;
        pthread_mutex_lock(&emulated_lock);
        CUresult result = side(device, piece->to + done, left, RIGHT_WRITE, &to, &to_upto);
        if (piece->from)
            result = result ? result : side(device, piece->from + done, left, RIGHT_READ, &from, &from_upto);
        else
            from = NULL, from_upto = left;
        pthread_mutex_unlock(&emulated_lock);
        if (result)
            return result;
        step = to_upto < from_upto ? to_upto : from_upto;
        if (from)
            memmove(to, from, step);
        else
            memset(to, 0, step);
    }
    return SUCCESS;
}
