/* Failures on demand. A rule is NAME:N=WHAT: the N-th call of NAME from now on (0: every one) gets the error WHAT, a
 * number; or `hang` (the call never returns), `kill` (the process dies by SIGKILL) or, of `run`, `spoil` (other bytes
 * arrive than were sent). Rules are separated by blanks,
 * commas or lines, and are read from EMULATED_CUDA_FAULTS, and from the file that EMULATED_CUDA_CONTROL names, anew
 * whenever that file changes. Counts begin when a rule is first read. The name `run` stands for a copy under way,
 * `run2` for one of the second stream that was made.
 *
 * Every call is a line of the file that EMULATED_CUDA_TRACE names: its NAME, and NAME=WHAT where a rule met it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emulated.h"

struct rule { char name[48], what[16]; long nth, seen; };

static struct rule rules[64];
static int rule_count;
static struct timespec control_read;
static ino_t control_inode;
static bool environment_read;
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

void complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("emulated CUDA: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static void parse(const char *text) {
    rule_count = 0;
    while (*text && rule_count < 64) {
        struct rule rule = {.seen = 0};
        int taken = 0;
        if (sscanf(text, " %47[A-Za-z0-9_]:%ld=%15[a-z0-9]%n", rule.name, &rule.nth, rule.what, &taken) == 3) {
            rules[rule_count++] = rule;
            text += taken;
        } else {
            text++;
        }
    }
}

static void read_rules(void) {
    const char *path = getenv("EMULATED_CUDA_CONTROL");
    struct stat found;
    if (path && stat(path, &found) == 0) {
        if (found.st_ino == control_inode && !memcmp(&found.st_mtim, &control_read, sizeof control_read))
            return;
        control_inode = found.st_ino;
        control_read = found.st_mtim;
        char text[4096];
        FILE *file = fopen(path, "re");
        if (!file)
            return;
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
        parse(text);
    } else if (!environment_read) {
        environment_read = true;
        const char *text = getenv("EMULATED_CUDA_FAULTS");
        if (text)
            parse(text);
    }
}

/* One write a line: processes share the file. */
static void trace(const char *name, const char *what) {
    const char *path = getenv("EMULATED_CUDA_TRACE");
    int file = path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0)
        return;
    dprintf(file, "%s%s%s\n", name, *what ? "=" : "", what);
    close(file);
}

CUresult ordered(const char *name) {
    const struct rule *due = NULL;
    pthread_mutex_lock(&rules_lock);
    read_rules();
    for (int i = 0; i < rule_count; i++)
        if (!strcmp(rules[i].name, name) && (++rules[i].seen == rules[i].nth || rules[i].nth == 0))
            due = &rules[i];
    char what[16] = "";
    if (due)
        strcpy(what, due->what);
    pthread_mutex_unlock(&rules_lock);
    trace(name, what);
    if (!strcmp(what, "kill"))
        kill(getpid(), SIGKILL);
    if (!strcmp(what, "kill") || !strcmp(what, "hang"))
        for (;;)
            pause();
    return strcmp(what, "spoil") ? atoi(what) : SPOIL;
}

CUresult enter(const char *name) {
    CUresult result = ordered(name);
    if (result)
        return result;
    return is_initialised() ? SUCCESS : NOT_INITIALIZED;
}

CUresult enter_context(const char *name) {
    CUresult result = enter(name);
    int device = current_device();
    if (result == ILLEGAL_ADDRESS && device >= 0)
        break_context(device, result); /* for good, as one that was not ordered */
    if (result)
        return result;
    if (device < 0)
        return INVALID_CONTEXT;
    return broken(device) ? broken(device) : forbidden(name);
}
