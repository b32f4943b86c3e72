/* What is asked of the L2 cache: memory set aside for windows, and the window of each stream. There is no cache: only the
 * rules are kept. */
#define _GNU_SOURCE
#include "emulated.h"

enum { KEPT = 6, WINDOW = 1, PERSISTING = 2, MOST = 64 };
typedef struct { uint64_t address; size_t nbytes; float hit_ratio; int hit, miss; } CUaccessPolicyWindow;

static size_t set_aside[DEVICES];
static struct { CUstream stream; CUaccessPolicyWindow window; } windows[MOST];

#define ENTER(name) do { CUresult met = enter_context(name); if (met) return met; } while (0)

EXPORTED CUresult cuCtxSetLimit(int limit, size_t value) {
    ENTER("cuCtxSetLimit");
    int most;
    cuDeviceGetAttribute(&most, 108, current_device());
    if (limit != KEPT)
        return NOT_SUPPORTED;
    set_aside[current_device()] = value < (size_t)most ? value : (size_t)most;
    return SUCCESS;
}

EXPORTED CUresult cuCtxGetLimit(size_t *value, int limit) {
    ENTER("cuCtxGetLimit");
    *value = limit == KEPT ? set_aside[current_device()] : 0;
    return limit == KEPT ? SUCCESS : NOT_SUPPORTED;
}

EXPORTED CUresult cuCtxResetPersistingL2Cache(void) {
    ENTER("cuCtxResetPersistingL2Cache");
    return SUCCESS;
}

static CUaccessPolicyWindow *window_of(CUstream stream) {
    int at = 0;
    while (at < MOST - 1 && windows[at].stream && windows[at].stream != stream)
        at++;
    windows[at].stream = stream;
    return &windows[at].window;
}

EXPORTED CUresult cuStreamSetAttribute(CUstream stream, int attribute, const CUaccessPolicyWindow *value) {
    ENTER("cuStreamSetAttribute");
    int most;
    cuDeviceGetAttribute(&most, 109, current_device());
    if (attribute != WINDOW)
        return NOT_SUPPORTED;
    if (!stream || value->nbytes > (size_t)most || value->hit_ratio < 0 || value->hit_ratio > 1 || value->miss == PERSISTING)
        return INVALID_VALUE;
    pthread_mutex_lock(&emulated_lock);
    bool is_device = !value->nbytes || device_range(value->address, value->nbytes);
    if (is_device)
        *window_of(stream) = *value;
    pthread_mutex_unlock(&emulated_lock);
    if (!is_device)
        complain("a window of the cache is not in device memory");
    return is_device ? SUCCESS : INVALID_VALUE;
}

EXPORTED CUresult cuStreamGetAttribute(CUstream stream, int attribute, CUaccessPolicyWindow *value) {
    ENTER("cuStreamGetAttribute");
    if (attribute != WINDOW)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&emulated_lock);
    *value = *window_of(stream);
    pthread_mutex_unlock(&emulated_lock);
    return SUCCESS;
}
