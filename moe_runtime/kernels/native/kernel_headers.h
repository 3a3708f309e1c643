// Everything that kernels.h needs from elsewhere: included before a target is chosen, so that no function of the
// standard library is compiled for a machine that it may not run on.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

// From BEGIN to END functions are compiled for a target, which whoever calls them has to ask for.
#define MOE_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN_TARGET(isa) MOE_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define END_TARGET MOE_PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(isa) MOE_PRAGMA(GCC push_options) MOE_PRAGMA(GCC target(isa))
#define END_TARGET MOE_PRAGMA(GCC pop_options)
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
