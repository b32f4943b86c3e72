/* Devices and their primary contexts. A context that met an illegal address is broken for good, as on hardware: each
 * further call of the process gets the same error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "emulated.h"

struct context { int device, retained; CUresult broken; };

pthread_mutex_t emulated_lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[DEVICES] = {{.device = 0}, {.device = 1}};
static bool initialised;
static __thread CUcontext current;

bool is_initialised(void) { return initialised; }
int current_device(void) { return current && current->retained ? current->device : -1; }
CUresult broken(int device) { return contexts[device].broken; }
void break_context(int device, CUresult why) {
    if (!contexts[device].broken)
        contexts[device].broken = why;
}

#define ENTER(name) do { CUresult met = enter(name); if (met) return met; } while (0)
#define ORDERED(name) do { CUresult met = ordered(name); if (met) return met; } while (0)
#define REQUIRE_DEVICE(device) do { if ((device) < 0 || (device) >= DEVICES) return INVALID_DEVICE; } while (0)

EXPORTED CUresult cuInit(unsigned int flags) {
    ORDERED("cuInit");
    if (flags)
        return INVALID_VALUE;
    if (setting("EMULATED_CUDA_DEVICES", DEVICES) == 0)
        return NO_DEVICE;
    initialised = true;
    return SUCCESS;
}

EXPORTED CUresult cuDriverGetVersion(int *version) {
    ORDERED("cuDriverGetVersion");
    *version = (int)setting("EMULATED_CUDA_VERSION", 13000);
    return SUCCESS;
}

EXPORTED CUresult cuDeviceGetCount(int *count) { ENTER("cuDeviceGetCount"); *count = DEVICES; return SUCCESS; }

EXPORTED CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet");
    REQUIRE_DEVICE(ordinal);
    *device = ordinal;
    return SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER("cuDeviceGetName");
    REQUIRE_DEVICE(device);
    snprintf(name, (size_t)length, "Emulated device %d", device);
    return SUCCESS;
}

EXPORTED CUresult cuDeviceGetUuid_v2(char *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid");
    REQUIRE_DEVICE(device);
    memset(uuid, 0xE0 + device, 16);
    return SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute");
    REQUIRE_DEVICE(device);
    switch (attribute) {
    case 16: *value = 8; return SUCCESS;   /* multiprocessors */
    case 40: *value = 2; return SUCCESS;   /* copy engines */
    case 75: *value = 9; return SUCCESS;   /* compute capability 9.0 */
    case 76: *value = 0; return SUCCESS;
    case 108: *value = 4 << 20; return SUCCESS;  /* of the L2 cache: what may be set aside, */
    case 109: *value = 16 << 20; return SUCCESS; /* and the largest window */
    case 97: *value = 227 << 10; return SUCCESS; /* shared memory of a block that asks for it */
    case 41: case 91: case 99: case 102: case 103: case 110: *value = 1; return SUCCESS;
    case 113: *value = (int)setting("EMULATED_CUDA_READ_ONLY_REGISTER", 1); return SUCCESS;
    default: return INVALID_VALUE;
    }
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain");
    REQUIRE_DEVICE(device);
    contexts[device].retained++;
    *context = &contexts[device];
    return SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease");
    REQUIRE_DEVICE(device);
    if (!contexts[device].retained)
        return INVALID_CONTEXT;
    contexts[device].retained--;
    return SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext context) { ENTER("cuCtxSetCurrent"); current = context; return SUCCESS; }
EXPORTED CUresult cuCtxGetCurrent(CUcontext *context) { ENTER("cuCtxGetCurrent"); *context = current; return SUCCESS; }

EXPORTED CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    CUresult met = enter_context("cuMemGetInfo");
    if (met)
        return met;
    long long total = setting("EMULATED_CUDA_MEMORY", 256L << 20), used = used_on(current_device());
    *total_bytes = (size_t)total;
    *free_bytes = used < total ? (size_t)(total - used) : 0;
    return SUCCESS;
}

static const struct { CUresult code; const char *name; } names[] = {
    {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
};

static CUresult name_of(CUresult code, const char **name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *name = names[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

EXPORTED CUresult cuGetErrorName(CUresult code, const char **name) {
    ORDERED("cuGetErrorName");
    return name_of(code, name);
}

EXPORTED CUresult cuGetErrorString(CUresult code, const char **text) {
    ORDERED("cuGetErrorString");
    return name_of(code, text);
}

/* The newest form of a function is the one that is exported, but for cuMemcpyBatchAsync. */
EXPORTED CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    char form[96];
    const char *const suffixes[] = {"_v2", ""};
    *function = NULL;
    ORDERED("cuGetProcAddress");
    int driver = (int)setting("EMULATED_CUDA_VERSION", 13000), first = 0;
    if (!strcmp(symbol, "cuMemcpyBatchAsync")) { /* has had two forms, in the order of the suffixes */
        if (driver < 12080 || version < 12080 || (version >= 13000 && driver < 13000))
            first = 2;
        else if (version < 13000)
            first = 1;
    }
    for (int i = first; i < 2 && !*function; i++) {
        snprintf(form, sizeof form, "%s%s", symbol, suffixes[i]);
        Dl_info us;
        void *found = dlsym(RTLD_DEFAULT, form);
        if (!found && dladdr((void *)cuInit, &us)) {
            void *library = dlopen(us.dli_fname, RTLD_NOLOAD | RTLD_NOW);
            found = library ? dlsym(library, form) : NULL;
        }
        *function = found;
    }
    (void)flags;
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
