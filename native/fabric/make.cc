/* fabric/make.cc: which transport a name means. */
#include "fabric/fabric.h"
#include "fabric/faulty/fabric.h"

namespace jaxrdma::fabric {

namespace {

Result<std::unique_ptr<Fabric>> make_real(const TransportOptions& transport,
                                          const Options& options) {
  if (transport.name == "tcp") return make_tcp_fabric(options);
  if (transport.name == "verbs") return make_verbs_fabric(options, transport.verbs);
  return Status(Code::kInvalidArgument,
                "there is no transport \"" + transport.name + "\"; there are tcp and verbs");
}

}  // namespace

Result<std::unique_ptr<Fabric>> make_fabric(const TransportOptions& transport,
                                            const Options& options) {
  auto real = make_real(transport, options);
  if (transport.fault.empty() || !real.ok()) return real;
  auto fault = faulty::parse(transport.fault);
  if (!fault.ok()) return fault.status();
  return std::unique_ptr<Fabric>(
      std::make_unique<faulty::FaultyFabric>(std::move(real.value()), fault.value()));
}

}  // namespace jaxrdma::fabric
