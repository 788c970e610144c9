/* A stand-in for libnvidia-ml.so.1 with one device, as a GB10 shows itself: memory by process, and no totals of its own.

   FAKE_NVML_FOLDER holds one file for each process that uses the device, named by its pid, with the bytes it uses (or "N/A").
   A process that has ended uses nothing any more, unless PID.kept lies beside it. Nothing but what nvidia-ml-py calls for us. */

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define GPU_IS_LOST 15
#define NOT_AVAILABLE (~0ULL)

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } process_t;

int nvmlInitWithFlags(unsigned flags) { (void)flags; return getenv("FAKE_NVML_FOLDER") ? SUCCESS : GPU_IS_LOST; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { (void)index; *handle = (void *)1; return SUCCESS; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) { (void)device; snprintf(name, length, "FAKE GB10"); return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *device, void *memory) { (void)device; (void)memory; return NOT_SUPPORTED; }
int nvmlDeviceGetMemoryInfo_v2(void *device, void *memory) { (void)device; (void)memory; return NOT_SUPPORTED; }

static int exists(const char *format, const char *first, const char *second)
{
    char path[4096];
    snprintf(path, sizeof path, format, first, second);
    return access(path, F_OK) == 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *found)
{
    const char *folder = getenv("FAKE_NVML_FOLDER");
    unsigned room = *count, used = 0;
    struct dirent *entry;
    DIR *list;
    (void)device;
    if (exists("%s/%s", folder, "lost") || !(list = opendir(folder))) return GPU_IS_LOST;
    while ((entry = readdir(list))) {
        char path[4096], text[64] = "";
        FILE *file;
        if (strspn(entry->d_name, "0123456789") != strlen(entry->d_name)) continue;
        if (!exists("/proc/%s%s", entry->d_name, "/fd") && !exists("%s/%s.kept", folder, entry->d_name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (!(file = fopen(path, "r"))) continue;
        if (fgets(text, sizeof text, file) && used < room && found) {
            found[used].pid = (unsigned)atoi(entry->d_name);
            found[used].bytes = text[0] == 'N' ? NOT_AVAILABLE : strtoull(text, NULL, 10);
            found[used].gpu_instance = found[used].compute_instance = ~0U;
        }
        fclose(file);
        used++;
    }
    closedir(list);
    *count = used;
    return used > room || (used && !found) ? INSUFFICIENT_SIZE : SUCCESS;
}
