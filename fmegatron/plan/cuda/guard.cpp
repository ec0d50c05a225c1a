// What a CPU build of torch lacks to trace fake CUDA tensors: a device guard that does nothing, hooks that answer "there
// is CUDA" to autograd, and the kernel of attention that torch would take on the device that is planned for. No memory
// is ever there: a real CUDA tensor that something makes is an error, which is what the checks want.
//
// FMEGATRON_CUDA_ARCH: 80, 90 or 100. FMEGATRON_CUDA_CUDNN: 1 where torch prefers cuDNN's attention (the default of its
// builds for CUDA 13 on sm_90 and sm_100), else 0.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cmath>
#include <cstdlib>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Stream stream() {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, 0));
}

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
c10::impl::DeviceGuardImplRegistrar guard(CUDA, new Guard());

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

int64_t setting(const char* name, int64_t otherwise) {
  const char* found = std::getenv(name);
  return found == nullptr ? otherwise : std::atoll(found);
}

// The rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13, for dense tensors on sm_80 to sm_100.
struct Attention {
  const at::Tensor &q, &k, &v;
  bool masked, causal;
  double dropout;
  int64_t arch = setting("FMEGATRON_CUDA_ARCH", 90);

  bool half() const { return q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf; }
  bool groups() const {
    return k.size(1) == v.size(1) && k.size(1) > 0 && q.size(1) % k.size(1) == 0;
  }
  bool lines() const { return q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1; }
  bool filled() const { return q.size(2) > 0 && k.size(2) > 0; }
  int64_t width() const { return q.size(-1); }

  bool cudnn() const {
    if (!at::globalContext().userEnabledCuDNNSDP() || at::globalContext().deterministicAlgorithms()) return false;
    const bool wide = arch >= 90 && width() == 192 && v.size(-1) == 128;
    const bool fits = wide || (width() <= 128 && v.size(-1) <= 128);
    const bool rounds = dropout * 16.0 == std::floor(dropout * 16.0);
    return half() && fits && width() % 8 == 0 && v.size(-1) % 8 == 0 && k.size(2) != 1 && rounds && groups() &&
        lines() && filled();
  }
  bool flash() const {
    if (!at::globalContext().userEnabledFlashSDP()) return false;
    const bool square = !causal || q.size(2) == k.size(2);
    const bool same = width() == k.size(-1) && width() == v.size(-1);
    return half() && !masked && same && width() <= 256 && square && groups() && lines() && filled();
  }
  bool efficient() const {
    if (!at::globalContext().userEnabledMemEfficientSDP()) return false;
    const int64_t align = half() ? 8 : 4;
    const bool aligned = width() == k.size(-1) && width() % align == 0 && v.size(-1) % align == 0;
    const bool each = q.size(1) == k.size(1) && k.size(1) == v.size(1);  // grouped heads: from 2.14 on
    return (half() || q.scalar_type() == at::kFloat) && aligned && each && lines() && filled();
  }
};

int64_t choose(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
               double dropout, bool causal, std::optional<double>, bool) {
  const Attention of{q, k, v, mask.has_value(), causal, dropout};
  const bool prefers = setting("FMEGATRON_CUDA_CUDNN", of.arch >= 90) != 0;
  auto backend = at::SDPBackend::math;
  if (q.dim() == 4) {
    if (prefers && of.cudnn()) backend = at::SDPBackend::cudnn_attention;
    else if (of.flash()) backend = at::SDPBackend::flash_attention;
    else if (of.efficient()) backend = at::SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(backend);
}

struct Chooses {
  Chooses() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose); }
} chooses;

} // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at
