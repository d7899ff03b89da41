// Prints the levels of the machine that compiles, as a bit mask: CMakeLists.txt runs it.
#include <stdio.h>

#include "cpu_levels.cpp"

int main() { printf("%d", cpu_levels()); }
