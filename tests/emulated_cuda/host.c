/* Registered host memory. Memory that the CPU may only read needs CU_MEMHOSTREGISTER_READ_ONLY, and no copy writes it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulated.h"

struct registered { uint64_t address; size_t nbytes; bool read_only, is_mapped; char file[64]; };

enum { MOST = 4096, FLAG_PORTABLE = 1, FLAG_MAP = 2, FLAG_READ_ONLY = 8 };
static struct registered table[MOST];

/* The rights that the CPU has on all of a range; -1 where a part is not mapped. `file`: what is mapped at its front. */
static int rights_of(uint64_t address, size_t nbytes, char file[64]) {
    FILE *maps = fopen("/proc/self/maps", "re");
    uint64_t upto = address, end = address + nbytes;
    int rights = RIGHT_READ | RIGHT_WRITE;
    char line[512];
    while (maps && upto < end && fgets(line, sizeof line, maps)) {
        unsigned long long from, to;
        char flags[5];
        if (sscanf(line, "%llx-%llx %4s", &from, &to, flags) != 3 || to <= upto)
            continue;
        if (from > upto)
            break;
        if (upto == address && sscanf(line, "%*s %*s %*s %*s %*s %63s", file) != 1)
            strcpy(file, "-");
        rights &= (flags[0] == 'r' ? RIGHT_READ : 0) | (flags[1] == 'w' ? RIGHT_WRITE : 0);
        upto = to;
    }
    if (maps)
        fclose(maps);
    return upto >= end ? rights : -1;
}

static CUresult put(struct registered entry) {
    struct registered *vacant = NULL;
    for (int i = 0; i < MOST; i++) {
        if (!table[i].nbytes)
            vacant = vacant ? vacant : &table[i];
        else if (table[i].address < entry.address + entry.nbytes && entry.address < table[i].address + table[i].nbytes)
            return ALREADY_REGISTERED;
    }
    if (!vacant)
        return OUT_OF_MEMORY;
    *vacant = entry;
    return SUCCESS;
}

EXPORTED CUresult cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned int flags) {
    CUresult result = enter_context("cuMemHostRegister");
    if (result)
        return result;
    if (!nbytes || flags & ~(unsigned)(FLAG_PORTABLE | FLAG_MAP | FLAG_READ_ONLY))
        return INVALID_VALUE;
    bool read_only = flags & FLAG_READ_ONLY;
    if (read_only && !setting("EMULATED_CUDA_READ_ONLY_REGISTER", 1))
        return NOT_SUPPORTED;
    struct registered entry = {(uint64_t)memory, nbytes, read_only, (flags & FLAG_MAP) != 0, "-"};
    int rights = rights_of(entry.address, nbytes, entry.file);
    if (rights < 0 || !(rights & RIGHT_READ) || (!read_only && !(rights & RIGHT_WRITE)))
        return INVALID_VALUE;
    pthread_mutex_lock(&emulated_lock);
    result = put(entry);
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

EXPORTED CUresult cuMemHostUnregister(void *memory) {
    CUresult result = enter_context("cuMemHostUnregister");
    if (result)
        return result;
    result = NOT_REGISTERED;
    pthread_mutex_lock(&emulated_lock);
    for (int i = 0; i < MOST; i++)
        if (table[i].nbytes && table[i].address == (uint64_t)memory) {
            if (is_pending(table[i].address, table[i].nbytes))
                complain("cuMemHostUnregister of memory that a copy under way touches");
            table[i].nbytes = 0;
            result = SUCCESS;
        }
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

/* Of memory that was registered with CU_MEMHOSTREGISTER_DEVICEMAP: kernels use it at its own address. */
EXPORTED CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned int flags) {
    CUresult result = enter_context("cuMemHostGetDevicePointer");
    if (result)
        return result;
    result = INVALID_VALUE;
    pthread_mutex_lock(&emulated_lock);
    for (int i = 0; i < MOST && !flags; i++)
        if (table[i].is_mapped && table[i].nbytes && (uint64_t)memory - table[i].address < table[i].nbytes) {
            *address = (CUdeviceptr)memory;
            result = SUCCESS;
        }
    pthread_mutex_unlock(&emulated_lock);
    return result;
}

void note_copy(uint64_t host, size_t nbytes, bool to_device) {
    const char *path = getenv("EMULATED_CUDA_COPIES"), *file = "-";
    FILE *log = path ? fopen(path, "ae") : NULL;
    for (int i = 0; i < MOST; i++)
        if (table[i].nbytes && host - table[i].address < table[i].nbytes)
            file = table[i].file;
    if (log) {
        fprintf(log, "%s %zu %s\n", to_device ? "in" : "out", nbytes, file);
        fclose(log);
    }
}

bool is_unregistered(uint64_t address) {
    for (int i = 0; i < MOST; i++)
        if (table[i].nbytes && address - table[i].address < table[i].nbytes)
            return false;
    return !msync((void *)(address & ~(uint64_t)4095), 1, MS_ASYNC) && setting("EMULATED_CUDA_STRICT", 1);
}

CUresult host_range(uint64_t address, size_t nbytes, int right) {
    uint64_t page = address & ~(uint64_t)4095;
    if (msync((void *)page, address + nbytes - page, MS_ASYNC)) {
        complain("a copy touches host memory that is not mapped (use after free?)");
        return ILLEGAL_ADDRESS;
    }
    for (int i = 0; i < MOST; i++)
        if (table[i].nbytes && address >= table[i].address && address + nbytes <= table[i].address + table[i].nbytes) {
            if (!(right & RIGHT_WRITE) || !table[i].read_only)
                return SUCCESS;
            complain("a copy writes host memory that was registered read-only");
            return ILLEGAL_ADDRESS;
        }
    if (!setting("EMULATED_CUDA_STRICT", 1))
        return SUCCESS;
    complain("a copy touches host memory that is not registered");
    return INVALID_VALUE;
}
