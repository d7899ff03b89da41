#include <new>

#if defined(__GLIBC__) && defined(__GLIBCXX__)
void std::__throw_bad_array_new_length() { throw bad_array_new_length(); }
#endif
