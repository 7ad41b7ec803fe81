# Included by CMake right after ggml's own project() call: ggml holds the kernels, they keep full optimisation
# while the rest of the engine is compiled with -O1 (a third of the compile time saved, decode speed unchanged).
set(polykv_kernel_flags "-O3 -DNDEBUG")

# Not AMX: compilers (GCC 12) drop the stores to its tile configuration as dead, and the engine ends with SIGSEGV at the first
# product of a quantised model, or computes garbage (upstream's issue 20824, pull request 26954).
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-amx-tile POLYKV_HAS_AMX)
if (POLYKV_HAS_AMX)
    string(APPEND polykv_kernel_flags " -mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
endif()

set(CMAKE_C_FLAGS_RELEASE   "${polykv_kernel_flags}")
set(CMAKE_CXX_FLAGS_RELEASE "${polykv_kernel_flags}")
