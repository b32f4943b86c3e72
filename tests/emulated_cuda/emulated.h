/* An emulated CUDA driver: what its files share. See README.md for what it is strict about.
 *
 * Types have the layout of cuda.h (13.x), so that callers of the real driver call this one unchanged.
 * One lock, `emulated_lock`, covers all tables; the bytes of a copy move without it.
 */
#ifndef EMULATED_H
#define EMULATED_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct graph *CUgraph;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, LAUNCH_TIMEOUT = 702, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901
};

enum { DEVICES = 2, GRANULARITY = 2 << 20, RIGHT_READ = 1, RIGHT_WRITE = 2, POISON = 0xA5, SPOIL = -1 };

typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; }
        allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct { int srcAccessOrder; CUmemLocation srcLocHint, dstLocHint; unsigned int flags; } CUmemcpyAttributes;

#define EXPORTED __attribute__((visibility("default")))

extern pthread_mutex_t emulated_lock;

/* faults.c: one of these is called first by every function of the driver. */
CUresult ordered(const char *name);          /* what was ordered for this call: of those that work before cuInit */
CUresult enter(const char *name);            /* the same, and that cuInit was called */
CUresult enter_context(const char *name);    /* that there is a context, too, which is not broken */

/* capture.c */
void capture_begun(int mode);
bool capture_ended(int mode);               /* whether nothing has spoiled it */
CUresult forbidden(const char *name);       /* CAPTURE_UNSUPPORTED, for a call that a capture forbids */

void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
long setting(const char *name, long otherwise);

/* devices.c */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
bool is_initialised(void);
int current_device(void);                    /* -1 where no context is current */
CUresult broken(int device);                 /* the sticky error of a device's context */
void break_context(int device, CUresult why);

/* memory.c: all with the lock held */
bool device_range(uint64_t address, size_t nbytes); /* whether it lies in reserved device addresses */
CUresult resolve(int device, uint64_t address, size_t nbytes, int right, char **at, size_t *upto);
bool is_mapped(int device, uint64_t address, int right);
long long used_on(int device);               /* bytes held by any process of this node */
void grant(int device, bool to_cpu);         /* let the CPU use a device's memory at its addresses as that device may */

/* host.c: with the lock held */
CUresult host_range(uint64_t address, size_t nbytes, int right);
void note_copy(uint64_t host, size_t nbytes, bool to_device); /* a line in the file EMULATED_CUDA_COPIES */
bool is_unregistered(uint64_t address); /* of the process, and nothing that the device may use */

/* streams.c */
struct piece { uint64_t to, from; size_t nbytes; };
CUresult enqueue_copies(CUstream stream, struct piece *pieces, size_t count); /* takes the pieces; call unlocked */
struct launch {
    int (*run)(const unsigned *, unsigned, unsigned long, unsigned, const void *);
    unsigned grid[3], threads, shared_bytes;
    _Alignas(16) unsigned char argument[4096];
};
CUresult enqueue_kernel(CUstream stream, struct launch *launch); /* takes the launch; call unlocked */
bool is_pending(uint64_t address, size_t nbytes); /* with the lock held: a queued copy touches it */
bool is_kernel_pending(int device);              /* the same; it may touch all that the device reaches */

/* copies.c */
CUresult run_copy(int device, const struct piece *piece);
void poison(int device, const struct piece *piece); /* with the lock held: where it will be copied to */
void spoil(int device, const struct piece *piece); /* the last byte that was copied */

/* kernels.c */
CUresult run_kernel(int device, const struct launch *launch);
#endif
