/* A stand-in for libcuda.so.1, for tests on machines without a GPU. Label whatever comes of it "fake-cuda".
 *
 * "Device" memory is memory of the host that was allocated by cuMemAlloc, so that addresses of the device can be told
 * from others, and copies are done at once. It shows that kvfs and kvikio call CUDA with the right addresses, sizes and
 * order, and give back what they take. It says nothing about DMA, streams that run on their own, cuFile, or speed.
 *
 * fake_fail(name, code): calls of this function return the code from now on. fake_counts: what was counted so far.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PUBLIC __attribute__((visibility("default")))
#define MAX_RANGES 1024
#define ERROR_INVALID_VALUE 1
#define ERROR_OUT_OF_MEMORY 2
#define ERROR_INVALID_DEVICE 101
#define PAGE 4096ull

typedef uint64_t address;
struct range {
    address begin, end;
};
struct counts {
    uint64_t device_allocations, host_allocations, registrations, streams, events; /* alive now */
    uint64_t copies_to_device, bytes_to_device, bytes_from_pinned;                 /* so far */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range device_ranges[MAX_RANGES], pinned_ranges[MAX_RANGES];
static struct counts counts;
static char failing_name[64];
static int failing_code;
static int context, other;
static __thread void *contexts[64];
static __thread int depth;

static int failure(const char *name) {
    pthread_mutex_lock(&lock);
    int code = strcmp(name, failing_name) == 0 ? failing_code : 0;
    pthread_mutex_unlock(&lock);
    return code;
}
#define MAY_FAIL                                                                                                        \
    do {                                                                                                                \
        int code_ = failure(__func__);                                                                                  \
        if (code_) return code_;                                                                                        \
    } while (0)

static struct range *find(struct range *ranges, address at, uint64_t size) {
    for (int i = 0; i < MAX_RANGES; i++)
        if (ranges[i].begin && at >= ranges[i].begin && at + size <= ranges[i].end) return &ranges[i];
    return NULL;
}

static int add(struct range *ranges, address begin, uint64_t size) {
    for (int i = 0; i < MAX_RANGES; i++)
        if (!ranges[i].begin) {
            ranges[i].begin = begin;
            ranges[i].end = begin + size;
            return 0;
        }
    return ERROR_OUT_OF_MEMORY;
}

static struct range *find_locked(struct range *ranges, address at, uint64_t size) {
    pthread_mutex_lock(&lock);
    struct range *found = find(ranges, at, size);
    pthread_mutex_unlock(&lock);
    return found;
}

PUBLIC void fake_fail(const char *name, int code) {
    pthread_mutex_lock(&lock);
    strncpy(failing_name, name, sizeof failing_name - 1);
    failing_code = code;
    pthread_mutex_unlock(&lock);
}
PUBLIC void fake_counts(struct counts *out) {
    pthread_mutex_lock(&lock);
    *out = counts;
    pthread_mutex_unlock(&lock);
}

/* devices and contexts: one device, one context */
PUBLIC int cuInit(unsigned flags) { MAY_FAIL; return 0; }
PUBLIC int cuDriverGetVersion(int *version) { *version = 12000; return 0; } /* for 13.0 kvikio asks for batched copies */
PUBLIC int cuDeviceGetCount(int *count) { *count = failure("no_device") ? 0 : 1; return 0; }
PUBLIC int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? ERROR_INVALID_DEVICE : 0; }
PUBLIC int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "fake-cuda", size); return 0; }
PUBLIC int cuDeviceGetAttribute(int *value, int attribute, int device) {
    MAY_FAIL;
    *value = attribute == 99 || (attribute == 113 && !failure("no_read_only")); /* memory of others can be registered */
    return 0;
}
PUBLIC int cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = &context; return 0; }
PUBLIC int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
PUBLIC int cuCtxCreate_v2(void **ctx, unsigned flags, int device) { *ctx = &context; return 0; }
PUBLIC int cuCtxCreate_v4(void **ctx, void *parameters, unsigned flags, int device) { *ctx = &context; return 0; }
PUBLIC int cuCtxDestroy_v2(void *ctx) { return 0; }
PUBLIC int cuCtxPushCurrent_v2(void *ctx) {
    if (depth >= 63) return ERROR_OUT_OF_MEMORY; /* somebody pushes and never pops */
    contexts[++depth] = ctx;
    return 0;
}
PUBLIC int cuCtxPopCurrent_v2(void **ctx) {
    if (!depth) return ERROR_INVALID_VALUE;
    if (ctx) *ctx = contexts[depth];
    depth--;
    return 0;
}
PUBLIC int cuCtxGetCurrent(void **ctx) { *ctx = depth ? contexts[depth] : NULL; return 0; }
PUBLIC int cuCtxGetDevice(int *device) { *device = 0; return 0; }

/* memory */
PUBLIC int cuMemAlloc_v2(address *out, size_t size) {
    MAY_FAIL;
    size_t rounded = (size + PAGE - 1) & ~(PAGE - 1);
    /* 256 bytes behind a page's begin, which is all that CUDA promises */
    char *memory = mmap(NULL, rounded + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int code = add(device_ranges, (address)memory + 256, size);
    counts.device_allocations++;
    pthread_mutex_unlock(&lock);
    *out = (address)memory + 256;
    return code;
}
PUBLIC int cuMemFree_v2(address at) {
    pthread_mutex_lock(&lock);
    struct range *found = find(device_ranges, at, 0);
    int is_whole = found && found->begin == at;
    if (is_whole) {
        size_t rounded = (found->end - found->begin + PAGE - 1) & ~(PAGE - 1);
        munmap((void *)(at - 256), rounded + PAGE);
        found->begin = found->end = 0;
        counts.device_allocations--;
    }
    pthread_mutex_unlock(&lock);
    return is_whole ? 0 : ERROR_INVALID_VALUE;
}
PUBLIC int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    MAY_FAIL;
    if (posix_memalign(out, PAGE, size)) return ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    add(pinned_ranges, (address)*out, size);
    counts.host_allocations++;
    pthread_mutex_unlock(&lock);
    return 0;
}
static int unpin(void *at, uint64_t *count) {
    pthread_mutex_lock(&lock);
    struct range *found = find(pinned_ranges, (address)at, 0);
    int is_whole = found && found->begin == (address)at;
    if (is_whole) {
        found->begin = found->end = 0;
        --*count;
    }
    pthread_mutex_unlock(&lock);
    return is_whole ? 0 : ERROR_INVALID_VALUE;
}
PUBLIC int cuMemFreeHost(void *at) {
    int code = unpin(at, &counts.host_allocations);
    if (!code) free(at);
    return code;
}
PUBLIC int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    MAY_FAIL;
    pthread_mutex_lock(&lock);
    int code = find(pinned_ranges, (address)at, size) ? 712 : add(pinned_ranges, (address)at, size);
    if (!code) counts.registrations++;
    pthread_mutex_unlock(&lock);
    return code;
}
PUBLIC int cuMemHostUnregister(void *at) { return unpin(at, &counts.registrations); }
PUBLIC int cuMemGetAddressRange_v2(address *begin, size_t *size, address at) {
    struct range *found = find_locked(device_ranges, at, 0);
    if (!found) return ERROR_INVALID_VALUE;
    *begin = found->begin;
    *size = found->end - found->begin;
    return 0;
}
PUBLIC int cuPointerGetAttribute(void *out, int attribute, address at) {
    if (!find_locked(device_ranges, at, 0)) return ERROR_INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = &context; return 0;
    case 2: *(int *)out = 2; return 0; /* CU_MEMORYTYPE_DEVICE */
    case 3: *(address *)out = at; return 0;
    case 9: *(int *)out = 0; return 0; /* ordinal of the device */
    }
    return ERROR_INVALID_VALUE;
}
PUBLIC int cuPointerGetAttributes(unsigned count, int *attributes, void **out, address at) {
    int is_device = find_locked(device_ranges, at, 0) != NULL;
    for (unsigned i = 0; i < count; i++)
        if (attributes[i] == 2) *(int *)out[i] = is_device ? 2 : 0;
    return 0;
}

/* copies: a copy to what is no device memory, or beyond it, is a mistake of the caller's */
PUBLIC int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) {
    MAY_FAIL;
    if (!find_locked(device_ranges, to, size)) return ERROR_INVALID_VALUE;
    int is_pinned = find_locked(pinned_ranges, (address)from, size) != NULL;
    memcpy((void *)to, from, size);
    pthread_mutex_lock(&lock);
    counts.copies_to_device++;
    counts.bytes_to_device += size;
    counts.bytes_from_pinned += is_pinned ? size : 0;
    pthread_mutex_unlock(&lock);
    return 0;
}
PUBLIC int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream) {
    if (!find_locked(device_ranges, from, size)) return ERROR_INVALID_VALUE;
    memcpy(to, (void *)from, size);
    return 0;
}
PUBLIC int cuMemcpyAsync(address to, address from, size_t size, void *stream) {
    return find_locked(device_ranges, to, size) ? cuMemcpyHtoDAsync_v2(to, (void *)from, size, stream)
                                                : cuMemcpyDtoHAsync_v2((void *)to, from, size, stream);
}

/* streams and events: everything is over when it is asked for */
static int made(void **out, uint64_t *count) {
    pthread_mutex_lock(&lock);
    ++*count;
    pthread_mutex_unlock(&lock);
    *out = &other;
    return 0;
}
static int ended(uint64_t *count) {
    pthread_mutex_lock(&lock);
    --*count;
    pthread_mutex_unlock(&lock);
    return 0;
}
PUBLIC int cuStreamCreate(void **stream, unsigned flags) { return made(stream, &counts.streams); }
PUBLIC int cuStreamDestroy_v2(void *stream) { return ended(&counts.streams); }
PUBLIC int cuStreamSynchronize(void *stream) { return 0; }
PUBLIC int cuEventCreate(void **event, unsigned flags) { return made(event, &counts.events); }
PUBLIC int cuEventDestroy_v2(void *event) { return ended(&counts.events); }
PUBLIC int cuEventRecord(void *event, void *stream) { return 0; }
PUBLIC int cuEventSynchronize(void *event) { return 0; }
PUBLIC int cuEventQuery(void *event) { return 0; }
PUBLIC int cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument) { function(argument); return 0; }
PUBLIC int cuGetErrorName(int code, const char **text) { *text = code ? "FAKE_CUDA_ERROR" : "CUDA_SUCCESS"; return 0; }
PUBLIC int cuGetErrorString(int code, const char **text) { *text = "an error of the fake libcuda"; return 0; }
