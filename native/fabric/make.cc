/* fabric/make.cc: which transport a name means. */
#include "fabric/fabric.h"

namespace jaxrdma::fabric {

Result<std::unique_ptr<Fabric>> make_fabric(const TransportOptions& transport,
                                            const Options& options) {
  if (transport.name == "tcp") return make_tcp_fabric(options);
  if (transport.name == "verbs") return make_verbs_fabric(options, transport.verbs);
  return Status(Code::kInvalidArgument,
                "there is no transport \"" + transport.name + "\"; there are tcp and verbs");
}

}  // namespace jaxrdma::fabric
