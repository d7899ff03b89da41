/* The one function of bcryptprimitives.dll that Rust's library calls (tokenizers is written in it), for releases
 * of Wine that lack it. For `make test-windows` alone: Windows has its own. */
__declspec(dllimport) unsigned char __stdcall SystemFunction036(void* buffer, unsigned long length);

__declspec(dllexport) int ProcessPrng(unsigned char* data, unsigned long long length) {
    while (length) {
        const unsigned long part = length > 0x10000000 ? 0x10000000 : (unsigned long)length;
        if (!SystemFunction036(data, part)) return 0;
        data += part;
        length -= part;
    }
    return 1;
}

int __stdcall DllMainCRTStartup(void* module, unsigned long reason, void* reserved) {
    (void)module, (void)reason, (void)reserved;
    return 1;
}
