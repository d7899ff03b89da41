// See system.hpp. Large pages need a privilege that programs do not have; waits on an address end at the
// border of the process, so ranks look again and again.
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include "system.hpp"

#include <errno.h>
#include <io.h>
#include <malloc.h>
#include <string.h>
#include <windows.h>

#include <string>

namespace {

// No byte of a file: locks keep others from reading what they cover.
constexpr int64_t kLockedByte = int64_t(1) << 62;

OVERLAPPED at(int64_t offset) {
    OVERLAPPED found = {};
    found.Offset = (DWORD)offset;
    found.OffsetHigh = (DWORD)(offset >> 32);
    return found;
}

HANDLE handle_of(int file) { return (HANDLE)_get_osfhandle(file); }

std::wstring wide(const char* path) {
    const int length = MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0);
    std::wstring found((size_t)(length > 0 ? length : 1), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, path, -1, &found[0], length);
    found.pop_back();  // the zero at the end
    return found;
}

HANDLE open_at(const char* path, DWORD made) {
    return CreateFileW(wide(path).c_str(), GENERIC_READ | GENERIC_WRITE,
                       FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr, made,
                       FILE_ATTRIBUTE_NORMAL, nullptr);
}

bool lock(HANDLE file, DWORD flags) {
    OVERLAPPED place = at(kLockedByte);
    return LockFileEx(file, flags | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &place);
}

}  // namespace

// ---- processes and threads ---------------------------------------------------------------------------

int64_t process_id() { return 0; }  // there is no fork

int usable_cpus() {
    DWORD_PTR own = 0, every = 0;
    if (GetActiveProcessorGroupCount() > 1) return (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &every)) return 0;
    return __builtin_popcountll(own);
}

void begin_computing_thread() {}

void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, int64_t nanoseconds) {
    (void)word, (void)seen;
    Sleep(nanoseconds < 1000 * 1000 ? 0 : 1);
}

void wake_all(std::atomic<uint32_t>* word) { (void)word; }

// ---- memory ------------------------------------------------------------------------------------------

uintptr_t page_size() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

void* aligned_memory(size_t bytes) { return _aligned_malloc(bytes, kMemoryLine); }

void free_aligned(void* memory) { _aligned_free(memory); }

void* map_memory(size_t bytes) {
    return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void unmap_memory(void* memory, size_t) { VirtualFree(memory, 0, MEM_RELEASE); }

bool is_resident(const void*) { return false; }

void will_need(const void* begin, size_t bytes) {
    WIN32_MEMORY_RANGE_ENTRY range = {const_cast<void*>(begin), bytes};
    PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

void populate_read(const void*, size_t) {}

// Unlocking pages that are not locked takes them out of the working set.
void release_pages(const void* begin, size_t bytes) { VirtualUnlock(const_cast<void*>(begin), bytes); }

// ---- files, by the descriptors that Python has -------------------------------------------------------

int64_t read_at(int file, void* to, int64_t bytes, int64_t offset, int* error) {
    constexpr int64_t kMost = 1 << 30;
    OVERLAPPED place = at(offset);
    DWORD count = 0;
    if (ReadFile(handle_of(file), to, (DWORD)(bytes < kMost ? bytes : kMost), &count, &place)) return count;
    if (GetLastError() == ERROR_HANDLE_EOF) return 0;
    if (error) *error = EIO;
    return -1;
}

void forget_cached(int, int64_t, int64_t) {}

void remove_if_same(int file, const char* path) {
    BY_HANDLE_FILE_INFORMATION here, there;
    const HANDLE other = open_at(path, OPEN_EXISTING);
    if (other == INVALID_HANDLE_VALUE) return;
    const bool known = GetFileInformationByHandle(handle_of(file), &here) &&
                       GetFileInformationByHandle(other, &there);
    CloseHandle(other);
    if (known && here.dwVolumeSerialNumber == there.dwVolumeSerialNumber &&
        here.nFileIndexHigh == there.nFileIndexHigh && here.nFileIndexLow == there.nFileIndexLow)
        DeleteFileW(wide(path).c_str());
}

int read_over(int file, int64_t offset, void* to, int64_t bytes) {
    // There are no leases, so files are not mapped: it is private memory already.
    if (file < 0) memset(to, 0, (size_t)bytes);
    int error = 0;
    for (int64_t done = file < 0 ? bytes : 0; done < bytes && !error;) {
        const int64_t got = read_at(file, (uint8_t*)to + done, bytes - done, offset + done, &error);
        if (!got) error = ENODATA;
        else if (got > 0) done += got;
    }
    return error;
}

// ---- files that processes share ----------------------------------------------------------------------

FileHandle create_locked(const char* path) {
    const HANDLE file = open_at(path, CREATE_NEW);
    if (file == INVALID_HANDLE_VALUE) return kNoFile;
    if (lock(file, LOCKFILE_EXCLUSIVE_LOCK)) return (FileHandle)file;
    CloseHandle(file);
    return kNoFile;
}

FileHandle open_shared(const char* path) {
    const HANDLE file = open_at(path, OPEN_EXISTING);
    return file == INVALID_HANDLE_VALUE ? kNoFile : (FileHandle)file;
}

void close_shared(FileHandle file) { CloseHandle((HANDLE)file); }

bool is_locked(FileHandle file) {
    if (!lock((HANDLE)file, 0)) return true;
    OVERLAPPED place = at(kLockedByte);
    UnlockFileEx((HANDLE)file, 0, 1, 0, &place);
    return false;
}

bool extend_file(FileHandle file, int64_t bytes) {
    LARGE_INTEGER end;
    end.QuadPart = bytes;
    return SetFilePointerEx((HANDLE)file, end, nullptr, FILE_BEGIN) && SetEndOfFile((HANDLE)file);
}

bool rename_file(const char* from, const char* to) {
    return MoveFileExW(wide(from).c_str(), wide(to).c_str(), MOVEFILE_REPLACE_EXISTING);
}

void* map_shared(FileHandle file, int64_t bytes) {
    const HANDLE mapping = CreateFileMappingW((HANDLE)file, nullptr, PAGE_READWRITE, (DWORD)(bytes >> 32),
                                              (DWORD)bytes, nullptr);
    if (!mapping) return nullptr;
    void* found = MapViewOfFile(mapping, FILE_MAP_ALL_ACCESS, 0, 0, (SIZE_T)bytes);
    CloseHandle(mapping);  // the view keeps it
    return found;
}

void unmap_shared(void* memory, int64_t) { UnmapViewOfFile(memory); }
#endif
