// Everything that kernels.h needs from elsewhere: included before a target is chosen, so that no function of the
// standard library is compiled for a machine that it may not run on.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
