/* Device memory: allocations are memfds, so that they are exported, imported and kept as descriptors, by any process.
 *
 * Addresses that the caller gets are mapped with no rights at all: the CPU faults on device memory, as on hardware.
 * Copies go by a second mapping of each piece, whose protection is what cuMemSetAccess gave. A kernel runs on the CPU, and
 * uses the first: `grant` gives that the same protection for as long. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emulated.h"

struct allocation { int descriptor, device; bool can_export, is_released; size_t nbytes; int mappings; };
struct mapping { uint64_t address; size_t nbytes; struct allocation *of; char *alias; int rights[DEVICES]; };
struct reservation { uint64_t address; size_t nbytes; };

enum { MOST = 4096 };
static struct allocation *allocations[MOST];
static struct mapping mappings[MOST];
static struct reservation reservations[MOST];

#define ENTER(name) do { CUresult met = enter_context(name); if (met) return met; } while (0)
#define LOCKED(expression) \
    do { pthread_mutex_lock(&emulated_lock); CUresult got = (expression); pthread_mutex_unlock(&emulated_lock); \
         return got; } while (0)

static const char *node(void) {
    const char *name = getenv("EMULATED_CUDA_NODE");
    return name && *name ? name : "node";
}

static void prefix_of(int device, char *into, size_t length) {
    snprintf(into, length, "/memfd:emulated-cuda-%s-%d-", node(), device);
}

/* Every process of the node that has the memory open keeps a descriptor of it: the kernel's list is the account. */
long long used_on(int device) {
    char prefix[160], path[300], link[300];
    long long used = 0;
    ino_t seen[MOST];
    int seen_count = 0;
    prefix_of(device, prefix, sizeof prefix);
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && (process = readdir(processes));) {
        if (process->d_name[0] < '0' || process->d_name[0] > '9')
            continue;
        snprintf(path, sizeof path, "/proc/%.20s/fd", process->d_name);
        DIR *descriptors = opendir(path);
        for (struct dirent *entry; descriptors && (entry = readdir(descriptors));) {
            snprintf(path, sizeof path, "/proc/%.20s/fd/%.20s", process->d_name, entry->d_name);
            ssize_t length = readlink(path, link, sizeof link - 1);
            struct stat found;
            if (length <= 0 || strncmp(link, prefix, strlen(prefix)) || stat(path, &found))
                continue;
            bool known = false;
            for (int i = 0; i < seen_count; i++)
                known = known || seen[i] == found.st_ino;
            if (!known && seen_count < MOST) {
                seen[seen_count++] = found.st_ino;
                used += found.st_size;
            }
        }
        if (descriptors)
            closedir(descriptors);
    }
    if (processes)
        closedir(processes);
    return used;
}

static CUmemGenericAllocationHandle listed(struct allocation allocation) {
    for (int i = 1; i < MOST; i++)
        if (!allocations[i]) {
            allocations[i] = malloc(sizeof allocation);
            *allocations[i] = allocation;
            return (CUmemGenericAllocationHandle)i;
        }
    close(allocation.descriptor);
    return 0;
}

static struct allocation *known(CUmemGenericAllocationHandle handle) {
    return handle > 0 && handle < MOST && allocations[handle] && !allocations[handle]->is_released
               ? allocations[handle] : NULL;
}

static void drop_if_unused(struct allocation *allocation) {
    if (!allocation->is_released || allocation->mappings)
        return;
    for (int i = 1; i < MOST; i++)
        if (allocations[i] == allocation)
            allocations[i] = NULL;
    close(allocation->descriptor);
    free(allocation);
}

EXPORTED CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option) {
    ENTER("cuMemGetAllocationGranularity");
    (void)option;
    if (prop->location.id < 0 || prop->location.id >= DEVICES)
        return INVALID_DEVICE;
    *granularity = GRANULARITY;
    return SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop) {
    int device = prop->location.id;
    if (!nbytes || nbytes % GRANULARITY || prop->type != 1 || prop->location.type != 1 || prop->allocFlags.usage)
        return INVALID_VALUE;
    if (device < 0 || device >= DEVICES)
        return INVALID_DEVICE;
    if (used_on(device) + (long long)nbytes > setting("EMULATED_CUDA_MEMORY", 256L << 20))
        return OUT_OF_MEMORY;
    char name[160], *pages;
    prefix_of(device, name, sizeof name);
    int descriptor = memfd_create(name + strlen("/memfd:"), MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)nbytes))
        return OUT_OF_MEMORY;
    pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (pages == MAP_FAILED)
        return OUT_OF_MEMORY;
    memset(pages, POISON, nbytes); /* nothing says that it is cleared */
    munmap(pages, nbytes);
    *handle = listed((struct allocation){descriptor, device, (prop->requestedHandleTypes & 1) != 0, false, nbytes, 0});
    return *handle ? SUCCESS : OUT_OF_MEMORY;
}

EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop,
                              unsigned long long flags) {
    ENTER("cuMemCreate");
    if (flags)
        return INVALID_VALUE;
    LOCKED(create(handle, nbytes, prop));
}

static CUresult export_one(int *descriptor, CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = known(handle);
    if (!allocation || !allocation->can_export)
        return INVALID_VALUE;
    *descriptor = fcntl(allocation->descriptor, F_DUPFD_CLOEXEC, 3);
    return *descriptor < 0 ? INVALID_VALUE : SUCCESS;
}

EXPORTED CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, int type,
                                               unsigned long long flags) {
    ENTER("cuMemExportToShareableHandle");
    if (type != 1 || flags)
        return INVALID_VALUE;
    LOCKED(export_one(descriptor, handle));
}

static CUresult import_one(CUmemGenericAllocationHandle *handle, int foreign) {
    char path[64], link[300], prefix[160];
    struct stat found;
    snprintf(path, sizeof path, "/proc/self/fd/%d", foreign);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length <= 0 || fstat(foreign, &found))
        return INVALID_VALUE;
    link[length] = 0;
    for (int device = 0; device < DEVICES; device++) {
        prefix_of(device, prefix, sizeof prefix);
        if (strncmp(link, prefix, strlen(prefix)))
            continue;
        int own = fcntl(foreign, F_DUPFD_CLOEXEC, 3);
        *handle = own < 0 ? 0 : listed((struct allocation){own, device, true, false, (size_t)found.st_size, 0});
        return *handle ? SUCCESS : OUT_OF_MEMORY;
    }
    return INVALID_VALUE; /* not memory of this driver */
}

EXPORTED CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type) {
    ENTER("cuMemImportFromShareableHandle");
    if (type != 1)
        return INVALID_VALUE;
    LOCKED(import_one(handle, (int)(intptr_t)descriptor));
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = known(handle);
    if (!allocation) {
        complain("cuMemRelease of a handle that is not held");
        return INVALID_VALUE;
    }
    allocation->is_released = true;
    drop_if_unused(allocation);
    return SUCCESS;
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { ENTER("cuMemRelease"); LOCKED(release(handle)); }

static CUresult reserve(CUdeviceptr *address, size_t nbytes) {
    for (int i = 0; i < MOST; i++)
        if (!reservations[i].nbytes) {
            char *wide = mmap(NULL, nbytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (wide == MAP_FAILED)
                return OUT_OF_MEMORY;
            uint64_t aligned = ((uint64_t)wide + GRANULARITY - 1) & ~(uint64_t)(GRANULARITY - 1);
            if (aligned > (uint64_t)wide)
                munmap(wide, aligned - (uint64_t)wide);
            if ((uint64_t)wide + GRANULARITY > aligned)
                munmap((void *)(aligned + nbytes), (uint64_t)wide + GRANULARITY - aligned);
            reservations[i] = (struct reservation){aligned, nbytes};
            *address = aligned;
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr wanted,
                                      unsigned long long flags) {
    ENTER("cuMemAddressReserve");
    if (!nbytes || nbytes % GRANULARITY || alignment > GRANULARITY || wanted || flags)
        return INVALID_VALUE;
    LOCKED(reserve(address, nbytes));
}

static CUresult address_free(CUdeviceptr address, size_t nbytes) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].nbytes && mappings[i].address >= address && mappings[i].address < address + nbytes)
            return INVALID_VALUE; /* still mapped */
    for (int i = 0; i < MOST; i++)
        if (reservations[i].nbytes == nbytes && reservations[i].address == address && nbytes) {
            munmap((void *)address, nbytes);
            reservations[i].nbytes = 0;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    ENTER("cuMemAddressFree");
    LOCKED(address_free(address, nbytes));
}

bool device_range(uint64_t address, size_t nbytes) {
    for (int i = 0; i < MOST; i++)
        if (reservations[i].nbytes && address >= reservations[i].address &&
            address + nbytes <= reservations[i].address + reservations[i].nbytes)
            return true;
    return false;
}

static struct mapping *at(uint64_t address) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].nbytes && address >= mappings[i].address && address < mappings[i].address + mappings[i].nbytes)
            return &mappings[i];
    return NULL;
}

static CUresult map(CUdeviceptr address, size_t nbytes, CUmemGenericAllocationHandle handle) {
    struct allocation *of = known(handle);
    if (!of || nbytes != of->nbytes || address % GRANULARITY || !device_range(address, nbytes))
        return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (mappings[i].nbytes && mappings[i].address < address + nbytes &&
            address < mappings[i].address + mappings[i].nbytes)
            return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (!mappings[i].nbytes) {
            char *alias = mmap(NULL, nbytes, PROT_NONE, MAP_SHARED, of->descriptor, 0);
            if (alias == MAP_FAILED)
                return OUT_OF_MEMORY;
            mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, of->descriptor, 0);
            mappings[i] = (struct mapping){address, nbytes, of, alias, {0}};
            of->mappings++;
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                           unsigned long long flags) {
    ENTER("cuMemMap");
    if (offset || flags)
        return INVALID_VALUE;
    LOCKED(map(address, nbytes, handle));
}

static CUresult unmap(CUdeviceptr address, size_t nbytes) {
    struct mapping *mapping = at(address);
    if (!mapping || mapping->address != address || mapping->nbytes != nbytes)
        return INVALID_VALUE;
    if (is_pending(address, nbytes))
        complain("cuMemUnmap of memory that a copy under way touches");
    munmap(mapping->alias, nbytes);
    mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapping->nbytes = 0;
    mapping->of->mappings--;
    drop_if_unused(mapping->of);
    return SUCCESS;
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) { ENTER("cuMemUnmap"); LOCKED(unmap(address, nbytes)); }

static int protection_of(int rights) {
    return (rights & RIGHT_READ ? PROT_READ : 0) | (rights & RIGHT_WRITE ? PROT_WRITE : 0);
}

void grant(int device, bool to_cpu) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].nbytes)
            mprotect((void *)mappings[i].address, mappings[i].nbytes,
                     to_cpu ? protection_of(mappings[i].rights[device]) : PROT_NONE);
}

static CUresult set_access(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *descriptions, size_t count) {
    struct mapping *mapping = at(address);
    if (!mapping || mapping->address != address || mapping->nbytes != nbytes)
        return INVALID_VALUE;
    int all = 0;
    for (size_t i = 0; i < count; i++) {
        int device = descriptions[i].location.id, flags = descriptions[i].flags;
        if (descriptions[i].location.type != 1 || device < 0 || device >= DEVICES || (flags != 0 && flags != 1 && flags != 3))
            return INVALID_VALUE;
        if (flags && device != mapping->of->device)
            return INVALID_DEVICE; /* as of devices that are no peers */
        mapping->rights[device] = flags;
    }
    for (int device = 0; device < DEVICES; device++)
        all |= mapping->rights[device];
    return mprotect(mapping->alias, nbytes, protection_of(all)) ? INVALID_VALUE : SUCCESS;
}

EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *descriptions, size_t count) {
    ENTER("cuMemSetAccess");
    LOCKED(set_access(address, nbytes, descriptions, count));
}

static CUresult allocate(CUdeviceptr *address, size_t nbytes, int device) {
    CUmemAllocationProp prop = {.type = 1, .location = {.type = 1, .id = device}};
    CUmemAccessDesc all = {.location = prop.location, .flags = RIGHT_READ | RIGHT_WRITE};
    CUmemGenericAllocationHandle handle;
    nbytes = (nbytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    CUresult result = create(&handle, nbytes, &prop);
    if (result)
        return result;
    result = reserve(address, nbytes);
    if (!result)
        result = map(*address, nbytes, handle);
    if (!result)
        result = set_access(*address, nbytes, &all, 1);
    release(handle);
    return result;
}

/* What needs no rights, no export and no reservation of its own. */
EXPORTED CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    ENTER("cuMemAlloc");
    if (!nbytes)
        return INVALID_VALUE;
    LOCKED(allocate(address, nbytes, current_device()));
}

static CUresult give_up(CUdeviceptr address) {
    struct mapping *mapping = at(address);
    size_t nbytes = mapping ? mapping->nbytes : 0;
    CUresult result = unmap(address, nbytes);
    return result ? result : address_free(address, nbytes);
}

EXPORTED CUresult cuMemFree_v2(CUdeviceptr address) { ENTER("cuMemFree"); LOCKED(give_up(address)); }

bool is_mapped(int device, uint64_t address, int right) {
    struct mapping *mapping = at(address);
    return mapping && (mapping->rights[device] & right) == right;
}

CUresult resolve(int device, uint64_t address, size_t nbytes, int right, char **to, size_t *upto) {
    struct mapping *mapping = at(address);
    if (!mapping) {
        complain("a copy touches device memory that is not mapped (use after free?): %#llx", (unsigned long long)address);
        return ILLEGAL_ADDRESS;
    }
    if ((mapping->rights[device] & right) != right) {
        complain("a copy %s device memory without the right", right == RIGHT_WRITE ? "writes" : "reads");
        return ILLEGAL_ADDRESS;
    }
    size_t left = mapping->address + mapping->nbytes - address;
    *to = mapping->alias + (address - mapping->address);
    *upto = left < nbytes ? left : nbytes;
    return SUCCESS;
}
