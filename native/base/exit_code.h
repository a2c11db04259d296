/* base/exit_code.h: the exit code of a program that is ending already.

   Where Python runs what is registered with its atexit, an exception reaches nobody and the exit
   code is decided. exit_with(code) makes it `code` all the same, unless the program ends with
   another one than 0 by itself: everything that Python does on its way out is still done, but not
   what C libraries had registered with theirs. Processes forked afterwards keep their own. */
#pragma once

namespace jaxrdma {

void exit_with(int code);

}  // namespace jaxrdma
