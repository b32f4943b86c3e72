/* What a capture forbids. While a thread captures a stream in the mode GLOBAL, calls of other threads that no capture sees
 * fail and spoil it, and so do the thread's own; a thread that has exchanged its mode for RELAXED may call them. */
#include <string.h>

#include "emulated.h"

enum { GLOBAL = 0, RELAXED = 2 };
static const char *const unseen[] = {
    "cuMemAlloc", "cuMemFree", "cuMemHostRegister", "cuMemHostUnregister", "cuModuleLoadData", "cuEventQuery",
    "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize",
};

static pthread_mutex_t captures_lock = PTHREAD_MUTEX_INITIALIZER;
static int global_captures;
static bool is_spoiled;
static __thread int thread_mode, own_captures, own_global;

EXPORTED CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    CUresult result = enter("cuThreadExchangeStreamCaptureMode");
    if (result)
        return result;
    if (*mode < GLOBAL || *mode > RELAXED)
        return INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

void capture_begun(int mode) {
    pthread_mutex_lock(&captures_lock);
    own_captures += mode != RELAXED;
    own_global += mode == GLOBAL;
    global_captures += mode == GLOBAL;
    pthread_mutex_unlock(&captures_lock);
}

bool capture_ended(int mode) {
    pthread_mutex_lock(&captures_lock);
    own_captures -= mode != RELAXED;
    own_global -= mode == GLOBAL;
    global_captures -= mode == GLOBAL;
    bool is_valid = !is_spoiled || mode != GLOBAL;
    is_spoiled = is_spoiled && global_captures;
    pthread_mutex_unlock(&captures_lock);
    return is_valid;
}

CUresult forbidden(const char *name) {
    bool is_unseen = false;
    for (size_t i = 0; i < sizeof unseen / sizeof *unseen; i++)
        is_unseen = is_unseen || !strcmp(unseen[i], name);
    if (!is_unseen)
        return SUCCESS;
    pthread_mutex_lock(&captures_lock);
    bool of_others = global_captures > own_global && thread_mode == GLOBAL;
    bool of_own = own_captures && thread_mode != RELAXED;
    is_spoiled = is_spoiled || of_others || of_own;
    pthread_mutex_unlock(&captures_lock);
    if (of_others)
        complain("%s while another thread captures a stream", name);
    return of_others || of_own ? CAPTURE_UNSUPPORTED : SUCCESS;
}
