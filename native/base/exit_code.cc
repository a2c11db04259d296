#include "base/exit_code.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

namespace jaxrdma {

void exit_with(int code) {
  // glibc's: unlike atexit it tells with what the program ends.
  on_exit(
      [](int ends_with, void* wanted) {
        if (ends_with != 0) return;
        std::fflush(nullptr);
        _exit(static_cast<int>(reinterpret_cast<intptr_t>(wanted)));
      },
      reinterpret_cast<void*>(static_cast<intptr_t>(code)));
}

}  // namespace jaxrdma
