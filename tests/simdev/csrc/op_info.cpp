#include "op_info.h"

#include <set>
#include <unordered_map>

#include "model.h"

namespace simdev {

namespace {

using OpTable = std::unordered_map<const c10::FunctionSchema*, OpInfo>;

OpTable& op_table() {
  static auto* table = new OpTable();
  return *table;
}

bool starts_with(const std::string& text, const char* start) {
  return text.rfind(start, 0) == 0;
}

bool returns_only_views(const c10::FunctionSchema& schema) {
  // These three have schemas that do not say so.
  static const std::set<std::string> unmarked{"aten::_unsafe_view", "aten::_reshape_alias", "aten::as_strided"};
  if (unmarked.count(schema.name()) > 0) {
    return true;
  }
  for (const auto& value : schema.returns()) {
    if (value.alias_info() == nullptr || value.alias_info()->isWrite()) {
      return false;
    }
  }
  return !schema.returns().empty();
}

OpInfo describe(const c10::FunctionSchema& schema) {
  static const std::set<std::string> data_dependent{
      "aten::nonzero",            "aten::masked_select", "aten::_unique2",          "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount",      "aten::repeat_interleave",
  };
  OpInfo info;
  info.name = intern(schema.name());
  info.returns = schema.returns().size();
  for (const auto& argument : schema.arguments()) {
    bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    info.writes.push_back(writes);
    info.writes_any = info.writes_any || writes;
  }
  info.only_views = !info.writes_any && returns_only_views(schema);
  info.takes_indices = starts_with(schema.name(), "aten::index") || starts_with(schema.name(), "aten::_index_put") ||
      starts_with(schema.name(), "aten::_unsafe_index");
  info.waits_for_device = data_dependent.count(schema.name()) > 0;
  return info;
}

double convolution_flops(const at::Tensor& weight, double outputs) {
  double kernel = 1;
  for (int64_t dim = 1; dim < weight.dim(); ++dim) {
    kernel *= static_cast<double>(weight.size(dim));
  }
  return 2 * outputs * kernel;
}

}  // namespace

OpInfo& op_info(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  auto found = op_table().find(&schema);
  if (found == op_table().end()) {
    found = op_table().emplace(&schema, describe(schema)).first;
  }
  return found->second;
}

const char* intern(const std::string& name) {
  static auto* names = new std::set<std::string>();
  return names->insert(name).first->c_str();
}

std::map<std::string, int64_t> calls_by_name() {
  std::map<std::string, int64_t> calls;
  for (const auto& [schema, info] : op_table()) {
    if (info.calls > 0) {
      calls[info.name] += info.calls;
    }
  }
  return calls;
}

void reset_calls() {
  for (auto& [schema, info] : op_table()) {
    info.calls = 0;
  }
}

double flops_of(const OpInfo& op, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  static const std::set<std::string> products{"aten::mm", "aten::bmm", "aten::linear"};
  static const std::set<std::string> products_with_bias{"aten::addmm", "aten::baddbmm"};
  if (outputs.empty() || !outputs[0].defined()) {
    return 0;
  }
  auto numel = static_cast<double>(outputs[0].numel());
  const std::string name = op.name;
  if (products.count(name) > 0) {
    return 2 * numel * static_cast<double>(inputs[0].size(-1));
  }
  if (products_with_bias.count(name) > 0) {
    return 2 * numel * static_cast<double>(inputs[1].size(-1));
  }
  if (name == "aten::convolution") {
    return convolution_flops(inputs[1], numel);
  }
  if (name == "aten::scaled_dot_product_attention") {
    return 4.0 * static_cast<double>(inputs[0].numel()) * static_cast<double>(inputs[1].size(-2));
  }
  return 0;
}

}  // namespace simdev
