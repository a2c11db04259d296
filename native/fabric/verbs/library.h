/* fabric/verbs/library.h: libibverbs, found when it is first needed.

   <infiniband/verbs.h> is used as it is, its inline functions too; what it only declares is defined
   in library.cc as a forwarder into the library opened at run time. So nothing here links
   libibverbs, and a machine without it can build, import and use every other transport. Where the
   header itself is missing at build time, JAXRDMA_HAVE_VERBS is 0 and `load_library` says so. */
#pragma once

#ifndef JAXRDMA_HAVE_VERBS  // CMakeLists.txt says it
#error JAXRDMA_HAVE_VERBS must be 0 or 1
#endif
#if JAXRDMA_HAVE_VERBS
#include <infiniband/verbs.h>
#endif

#include <string>

#include "base/status.h"

namespace jaxrdma::fabric::verbs {

/// Opens libibverbs (`JAXRDMA_IBVERBS_LIB`, else "libibverbs.so.1") once and looks up every symbol.
/// Must succeed before any ibv_ function is called. The library is never closed: its providers
/// have handlers of their own that run at exit.
Status load_library();

/// Where the loaded library lies on disk; empty before `load_library` has succeeded.
std::string library_path();

}  // namespace jaxrdma::fabric::verbs
