// The services of the operating system that the kernels use beyond the C++ library, on Linux, macOS and
// Windows. Nothing else includes a header of one system, but cpu_levels.cpp, which asks for instructions.
//
// A service that a system lacks does nothing there if that only costs time or memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>

// ---- processes and threads ---------------------------------------------------------------------------

// Changes in a forked child.
int64_t process_id();
// The logical CPUs that this process may use; 0: unknown.
int usable_cpus();
// Called first by threads that compute: where cores have kinds, they ask for the fast ones.
void begin_computing_thread();

// Sleeps until `word` is not `seen`, for at most `nanoseconds`; may return early. `word` may lie in memory
// that other processes share.
void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, int64_t nanoseconds);
void wake_all(std::atomic<uint32_t>* word);

// ---- memory ------------------------------------------------------------------------------------------

enum { kMemoryLine = 64 };

uintptr_t page_size();
// `bytes` that begin at a multiple of kMemoryLine, and are one; null: memory is used up.
void* aligned_memory(size_t bytes);
void free_aligned(void* memory);
// Private zeros in whole pages, on huge pages where the system has them; null: memory is used up.
void* map_memory(size_t bytes);
void unmap_memory(void* memory, size_t bytes);

// Of mapped files. Advice: if the system cannot follow it, memory is read or given up later.
bool is_resident(const void* at);
// Begins to read the pages; returns at once.
void will_need(const void* begin, size_t bytes);
// Reads the pages and maps them, in one call.
void populate_read(const void* begin, size_t bytes);
void release_pages(const void* begin, size_t bytes);

// ---- files, by the descriptors that Python has -------------------------------------------------------

// Reads up to `bytes` at `offset`; fewer at the end. -1: an error, which `*error` says.
int64_t read_at(int file, void* to, int64_t bytes, int64_t offset, int* error = nullptr);
// Drops this part of the file from the system's cache.
void forget_cached(int file, int64_t offset, int64_t bytes);
// Removes the file at `path` (UTF-8), if that is this open file.
void remove_if_same(int file, const char* path);
// Replaces `bytes` of a mapping at `at` by private memory with the same bytes of the file, read at
// `offset`; with file -1 by zeros. Where files are mapped (Linux) other threads may read them meanwhile.
// 0, or an errno; ENODATA: the file ends before.
int read_over(int file, int64_t offset, void* at, int64_t bytes);

// ---- files that processes share, by name (UTF-8) -----------------------------------------------------

typedef intptr_t FileHandle;
constexpr FileHandle kNoFile = -1;

// A new file of this user's, locked until it is closed or the process ends, however it ends.
FileHandle create_locked(const char* path);
FileHandle open_shared(const char* path);
void close_shared(FileHandle file);
// Whether another opening of the file has it locked.
bool is_locked(FileHandle file);
// False: the disk or the memory is full, where the system can say so.
bool extend_file(FileHandle file, int64_t bytes);
bool rename_file(const char* from, const char* to);
void* map_shared(FileHandle file, int64_t bytes);
void unmap_shared(void* memory, int64_t bytes);
