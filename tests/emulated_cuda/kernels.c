/* Modules and kernels. A module is the cubin that the caller compiled: it says which kernels there are. What runs is the
 * same source, built for the host (tests/cuda_shim), from a library that EMULATED_CUDA_KERNELS names; more than one are
 * separated by colons. One kernel runs at a time, on its stream's thread. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

enum { MOST = 64, DYNAMIC_SHARED_SIZE = 8, FREE_SHARED_BYTES = 48 << 10, MOST_THREADS = 1024 };
struct module { const char *image; bool is_loaded; };
struct function { struct launch how; size_t argument_bytes; struct module *of; unsigned most_shared_bytes; };

static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread sigjmp_buf *way_out; /* of the kernel that this thread runs */
static struct sigaction before[2];

#define ENTER(name) do { CUresult met = enter_context(name); if (met) return met; } while (0)

/* Whether a cubin has a kernel of this name: its code is a section of its own. */
static bool has_kernel(const char *image, const char *name) {
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + head->e_shoff);
    const char *names = image + sections[head->e_shstrndx].sh_offset;
    char wanted[256];
    snprintf(wanted, sizeof wanted, ".text.%s", name);
    for (int i = 0; i < head->e_shnum; i++)
        if (!strcmp(names + sections[i].sh_name, wanted))
            return true;
    return false;
}

static void *symbol(const char *form, const char *name) {
    char wanted[256], paths[4096];
    const char *listed = getenv("EMULATED_CUDA_KERNELS");
    snprintf(wanted, sizeof wanted, form, name);
    snprintf(paths, sizeof paths, "%s", listed ? listed : "");
    for (char *rest, *path = strtok_r(paths, ":", &rest); path; path = strtok_r(NULL, ":", &rest)) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        void *found = library ? dlsym(library, wanted) : NULL;
        if (!library)
            complain("%s", dlerror());
        if (found)
            return found;
    }
    return NULL;
}

/* An address that the device may not use: the kernel's thread goes on after the launch. Any other fault is the process's. */
static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    if (way_out) {
        complain("a kernel touches memory that is not mapped or lacks the right: %p", info->si_addr);
        siglongjmp(*way_out, 1);
    }
    sigaction(number, &before[number == SIGBUS], NULL); /* the instruction faults again */
}

static void catch_faults(void) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &ours, &before[0]);
    sigaction(SIGBUS, &ours, &before[1]);
}

EXPORTED CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    ENTER("cuModuleLoadData");
    const Elf64_Ehdr *head = image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine != 190 /* CUDA */)
        return INVALID_IMAGE;
    pthread_once(&once, catch_faults);
    size_t nbytes = head->e_shoff + (size_t)head->e_shnum * sizeof(Elf64_Shdr);
    const Elf64_Shdr *sections = (const Elf64_Shdr *)((const char *)image + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > nbytes)
            nbytes = sections[i].sh_offset + sections[i].sh_size;
    char *own = malloc(nbytes);
    memcpy(own, image, nbytes);
    *module = malloc(sizeof **module);
    **module = (struct module){own, true};
    return SUCCESS;
}

/* Its memory stays, so that the use of a function after it is seen. */
EXPORTED CUresult cuModuleUnload(CUmodule module) {
    ENTER("cuModuleUnload");
    if (!module->is_loaded)
        return INVALID_HANDLE;
    module->is_loaded = false;
    return SUCCESS;
}

EXPORTED CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER("cuModuleGetFunction");
    if (!module->is_loaded)
        return INVALID_HANDLE;
    if (!has_kernel(module->image, name))
        return NOT_FOUND;
    struct function found = {.of = module, .most_shared_bytes = FREE_SHARED_BYTES};
    const unsigned long *argument_bytes = symbol("shim_bytes_%s", name);
    *(void **)&found.how.run = symbol("shim_%s", name);
    if (!found.how.run || !argument_bytes || *argument_bytes > sizeof found.how.argument) {
        complain("no library of EMULATED_CUDA_KERNELS has the kernel %s", name);
        return NOT_FOUND;
    }
    found.argument_bytes = *argument_bytes;
    *function = malloc(sizeof found);
    **function = found;
    return SUCCESS;
}

EXPORTED CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    ENTER("cuFuncSetAttribute");
    int most;
    cuDeviceGetAttribute(&most, 97, current_device());
    if (attribute != DYNAMIC_SHARED_SIZE || value < 0 || value > most)
        return INVALID_VALUE;
    function->most_shared_bytes = (unsigned)value;
    return SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
                                 unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CUstream stream,
                                 void **arguments, void **extra) {
    ENTER("cuLaunchKernel");
    if (!function->of->is_loaded)
        return INVALID_HANDLE;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > MOST_THREADS || extra ||
        shared_bytes > function->most_shared_bytes)
        return INVALID_VALUE;
    if (threads_y != 1 || threads_z != 1 || threads % 32)
        return NOT_SUPPORTED;
    struct launch *launch = malloc(sizeof *launch);
    *launch = (struct launch){function->how.run, {grid_x, grid_y, grid_z}, threads, shared_bytes, {0}};
    memcpy(launch->argument, arguments[0], function->argument_bytes);
    return enqueue_kernel(stream, launch);
}

static CUresult run_caught(const struct launch *launch) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1)) {
        way_out = NULL;
        return ILLEGAL_ADDRESS;
    }
    way_out = &here;
    int is_stuck = launch->run(launch->grid, launch->threads, launch->shared_bytes, 0, launch->argument);
    way_out = NULL;
    if (is_stuck)
        complain("a kernel's threads wait at a barrier that others never reach");
    return is_stuck ? LAUNCH_TIMEOUT : SUCCESS;
}

/* Whether an argument names host memory that the device may not use. What is read from memory that it names goes unseen. */
static bool names_unregistered(const struct launch *launch) {
    for (size_t at = 0; at < sizeof launch->argument; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, launch->argument + at, sizeof word);
        if (word >= 1 << 16 && !device_range(word, 1) && is_unregistered(word)) {
            complain("a kernel is given host memory that is not registered: %#llx", (unsigned long long)word);
            return true;
        }
    }
    return false;
}

CUresult run_kernel(int device, const struct launch *launch) {
    pthread_mutex_lock(&kernel_lock);
    pthread_mutex_lock(&emulated_lock);
    if (names_unregistered(launch)) {
        pthread_mutex_unlock(&emulated_lock);
        pthread_mutex_unlock(&kernel_lock);
        return ILLEGAL_ADDRESS;
    }
    grant(device, true);
    pthread_mutex_unlock(&emulated_lock);
    CUresult result = run_caught(launch);
    pthread_mutex_lock(&emulated_lock);
    grant(device, false);
    pthread_mutex_unlock(&emulated_lock);
    pthread_mutex_unlock(&kernel_lock);
    return result;
}
