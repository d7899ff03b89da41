// What Windows has is in system_windows.cpp.
#if !defined(_WIN32)
#include "system.hpp"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <string>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <pthread.h>
#include <pthread/qos.h>
#endif

// ---- processes and threads ---------------------------------------------------------------------------

int64_t process_id() { return getpid(); }

int usable_cpus() {
#if defined(__linux__)
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
#else
    return 0;
#endif
}

void begin_computing_thread() {
#if defined(__APPLE__)
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#endif
}

void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, int64_t nanoseconds) {
#if defined(__linux__)
    const timespec limit = {0, (long)nanoseconds};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else  // no call for it that programs may use
    (void)word, (void)seen;
    const timespec wait = {0, nanoseconds < 50 * 1000 ? (long)nanoseconds : 50 * 1000};
    nanosleep(&wait, nullptr);
#endif
}

void wake_all(std::atomic<uint32_t>* word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// ---- memory ------------------------------------------------------------------------------------------

uintptr_t page_size() { return (uintptr_t)sysconf(_SC_PAGESIZE); }

void* aligned_memory(size_t bytes) {
    void* found = nullptr;
    return posix_memalign(&found, kMemoryLine, bytes) == 0 ? found : nullptr;
}

void free_aligned(void* memory) { free(memory); }

void* map_memory(size_t bytes) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (found == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(found, bytes, MADV_HUGEPAGE);
#endif
    return found;
}

void unmap_memory(void* memory, size_t bytes) { munmap(memory, bytes); }

bool is_resident(const void* at) {
#if defined(__linux__)
    unsigned char there = 0;
    return mincore(const_cast<void*>(at), 1, &there) || there & 1;
#else
    (void)at;
    return true;
#endif
}

void will_need(const void* begin, size_t bytes) { madvise(const_cast<void*>(begin), bytes, MADV_WILLNEED); }

void populate_read(const void* begin, size_t bytes) {
#if defined(__linux__)
    enum { kPopulateRead = 22 };  // older headers lack MADV_POPULATE_READ; EINVAL before Linux 5.14
    madvise(const_cast<void*>(begin), bytes, kPopulateRead);
#else
    (void)begin, (void)bytes;
#endif
}

void release_pages(const void* begin, size_t bytes) {
    madvise(const_cast<void*>(begin), bytes, MADV_DONTNEED);
}

// ---- files, by the descriptors that Python has -------------------------------------------------------

int64_t read_at(int file, void* to, int64_t bytes, int64_t offset, int* error) {
    for (;;) {
        const ssize_t got = pread(file, to, (size_t)bytes, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && error) *error = errno;
        return got;
    }
}

void forget_cached(int file, int64_t offset, int64_t bytes) {
#if defined(__linux__)
    posix_fadvise(file, offset, bytes, POSIX_FADV_DONTNEED);
#else
    (void)file, (void)offset, (void)bytes;
#endif
}

// What another process has put there meanwhile stays.
void remove_if_same(int file, const char* path) {
#if defined(__linux__)  // fstat() of a new glibc would need that one
    const std::string link = "/proc/self/fd/" + std::to_string(file), name = path;
    std::string found(name.size() + 1, '\0');
    const ssize_t length = readlink(link.c_str(), &found[0], found.size());
    if (length == (ssize_t)name.size() && !found.compare(0, name.size(), name)) unlink(path);
#else
    struct stat here, there;
    if (fstat(file, &here) != 0 || lstat(path, &there) != 0) return;
    if (here.st_dev == there.st_dev && here.st_ino == there.st_ino) unlink(path);
#endif
}

namespace {

// 0, or an errno. The file may be -1.
int read_whole(int file, int64_t offset, uint8_t* to, int64_t bytes) {
    int error = 0;
    for (int64_t done = file < 0 ? bytes : 0; done < bytes && !error;) {
        const int64_t got = read_at(file, to + done, bytes - done, offset + done, &error);
        if (!got) error = ENODATA;
        else if (got > 0) done += got;
    }
    return error;
}

}  // namespace

int read_over(int file, int64_t offset, void* at, int64_t bytes) {
    const size_t size = (size_t)bytes;
#if defined(__linux__)
    void* memory = map_memory(size);
    if (!memory) return errno;
    int error = read_whole(file, offset, (uint8_t*)memory, bytes);
    if (!error && mprotect(memory, size, PROT_READ)) error = errno;
    if (!error && mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) error = errno;
    if (error) munmap(memory, size);
    return error;
#else  // files are not mapped where the system lacks leases: this is private memory already
    if (file < 0) memset(at, 0, size);
    return read_whole(file, offset, (uint8_t*)at, bytes);
#endif
}

// ---- files that processes share ----------------------------------------------------------------------

FileHandle create_locked(const char* path) {
    const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    // flock locks belong to this opening of the file, and end with the process.
    if (file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0) return file;
    if (file >= 0) close(file);
    return kNoFile;
}

FileHandle open_shared(const char* path) { return open(path, O_RDWR | O_CLOEXEC); }

void close_shared(FileHandle file) { close((int)file); }

// A lock that this process could take is one that its holder's death has released.
bool is_locked(FileHandle file) {
    if (flock((int)file, LOCK_SH | LOCK_NB) != 0) return true;
    flock((int)file, LOCK_UN);
    return false;
}

// Linux reports a full file system here, not by a signal when the memory is first written.
bool extend_file(FileHandle file, int64_t bytes) {
#if defined(__linux__)
    return posix_fallocate((int)file, 0, bytes) == 0;
#else
    return ftruncate((int)file, bytes) == 0;
#endif
}

bool rename_file(const char* from, const char* to) { return rename(from, to) == 0; }

void* map_shared(FileHandle file, int64_t bytes) {
    void* found = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)file, 0);
    return found == MAP_FAILED ? nullptr : found;
}

void unmap_shared(void* memory, int64_t bytes) { munmap(memory, (size_t)bytes); }
#endif
