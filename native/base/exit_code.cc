#include "base/exit_code.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

namespace jaxrdma {

namespace {
pid_t ending = 0;
}  // namespace

void exit_with(int code) {
  ending = getpid();
  // glibc's: unlike atexit it tells with what the program ends.
  on_exit(
      [](int ends_with, void* wanted) {
        if (ends_with != 0 || getpid() != ending) return;
        std::fflush(nullptr);
        _exit(static_cast<int>(reinterpret_cast<intptr_t>(wanted)));
      },
      reinterpret_cast<void*>(static_cast<intptr_t>(code)));
}

}  // namespace jaxrdma
