// What step functions and containers do between modules: operators and parameters of any rank.
#include "engine_fixture.h"

namespace smp::pipeline {
namespace {

class EngineGlue : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
  ModelSpec spec_;
};

TEST_F(EngineGlue, glue_may_use_parameters_of_any_rank) {
  spec_.block("a", 0).block("b", 1).parameter("scale", at::randn({6}), 0).parameter("shift", at::randn({6}), 1);
  spec_.module({"container",
                1,
                [](Model& model, const Tensors& in) {
                  return Tensors{model("a", in[0] * model.parameter("shift")) * model.parameter("scale")};
                },
                {"scale", "shift"},
                {"a"}});
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    auto x = model("a", data[static_cast<std::size_t>(i)] * model.parameter("scale")) + model.parameter("shift");
    x = model("b", model("container", x));
    const auto loss = loss_of(x);
    loss.backward();
    return Tensors{loss};
  });
}

TEST_F(EngineGlue, a_local_tensor_may_be_used_on_several_ranks) {
  spec_.block("a", 0).block("b", 1).block("c", 2).parameter("scale", at::randn({6}), 0);
  expect_equals_plain(spec_, 3, [data = batches(4)](Model& model, int i) {
    const auto scale = model.parameter("scale").square();  // runs here, and keeps what its backward needs
    const auto x = model("b", model("a", data[static_cast<std::size_t>(i)]) * scale);
    const auto loss = loss_of(model("c", x).cumsum(0) * scale);
    loss.backward();
    return Tensors{loss};
  });
}

TEST_F(EngineGlue, local_tensors_that_are_used_elsewhere_may_share_their_graph) {
  spec_.block("a", 0).block("b", 1).parameter("scale", at::randn({6}), 0);
  const auto body = [data = batches(1)](Model& model, int) {
    const auto scale = model.parameter("scale").square();
    const auto loss = loss_of(model("b", model("a", data[0]) * scale) * scale.exp());
    loss.backward();
    return Tensors{loss};
  };
  Cluster cluster(spec_, 2);
  Model plain(spec_);
  run_plainly(plain, body, 1);
  cluster.step(body, 1);
  // The shared part runs once for each of them, so the sum is made in another order.
  EXPECT_TRUE(at::allclose(cluster.model(0).parameter("scale").grad(), plain.parameter("scale").grad()));
}

TEST_F(EngineGlue, a_weight_may_be_tied_between_ranks) {
  spec_.parameter("embed", at::randn({10, 6}), 0).block("b", 1);
  spec_.module({"embedding",
                0,
                [](Model& model, const Tensors& in) { return Tensors{at::embedding(model.parameter("embed"), in[0])}; },
                {"embed"}});
  expect_equals_plain(spec_, 2, [](Model& model, int i) {
    const auto ids = at::remainder(at::arange(8, at::kLong) * (i + 3), 10);
    const auto x = model("b", model("embedding", ids));
    const auto logits = at::matmul(x, model.parameter("embed").t());
    const auto loss = at::cross_entropy_loss(logits, ids);
    loss.backward();
    return Tensors{loss, logits};
  });
}

TEST_F(EngineGlue, operators_between_ranks_run_where_the_data_lies) {
  spec_.block("a", 0).block("b", 1);
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    const auto h = model("a", data[static_cast<std::size_t>(i)]);
    auto y = model("b", h);
    auto view = y.view({2, 2, 6}).transpose(0, 1).reshape({4, 6});
    y = at::cat({view, h.slice(0, 0, 2)}, 0);   // operands of two ranks
    y = y.clone().mul_(2).add_(at::ones({6}));  // in place
    y = y.index({at::tensor({5, 0, 3, 3})});    // a local index
    y.select(0, 1).mul_(0.5);                   // in place through a view
    const auto parts = y.split(2, 1);           // several results
    y = parts[0] + parts[1] * parts[2];
    const auto loss = at::where(y > 0, y, y * 0.1).sum() + 3;
    loss.backward();
    return Tensors{loss, y};
  });
}

TEST_F(EngineGlue, operators_may_write_through_views) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    const auto y = model("a", data[static_cast<std::size_t>(i)]) * 1;
    y.select(0, 1).mul_(0.5);
    y.t().index_put_({at::tensor({1, 4})}, at::ones({2, 4}));
    y.slice(1, 2, 6, 2).slice(0, 1).exp_();
    const auto part = y.split(2, 1)[1];
    const auto loss = loss_of(y) + part.sum();
    loss.backward();
    return Tensors{loss, y, part};
  });
}

TEST_F(EngineGlue, gradients_may_lie_in_memory_otherwise_than_their_inputs) {
  spec_.block("a", 0).block("b", 1);
  spec_.module(
      {"turn", 1, [](Model&, const Tensors& in) { return Tensors{at::cumsum(in[0].t(), 1) * at::arange(4.0)}; }});
  spec_.module({"merge", 1, [](Model&, const Tensors& in) {
                  return Tensors{at::cumsum(in[0].permute({2, 1, 0}), 0).flatten()};
                }});
  spec_.module({"spread", 1, [](Model&, const Tensors& in) { return Tensors{in[0] * in[0].t().contiguous().t()}; }});
  expect_equals_plain(spec_, 2, [data = batches(4, 4)](Model& model, int i) {
    auto h = model("b", model("a", data[static_cast<std::size_t>(i)]));
    h = model("turn", h.view({2, 2, 6}).reshape({4, 6})).view({3, 8}).flatten().view({4, 6});
    h = model("spread", h.slice(0, 0, 1).expand({4, 6}));
    h = h.unflatten(1, {2, 3}).permute({2, 0, 1}).reshape({3, 8});
    // The gradient of what merge gets can't be viewed as a matrix.
    const auto loss = loss_of(h) + loss_of(model("merge", model("b", data[0]).view({2, 2, 6})));
    loss.backward();
    return Tensors{loss, h};
  });
}

TEST_F(EngineGlue, results_whose_shape_depends_on_data_are_asked_for) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    const auto y = model("a", data[static_cast<std::size_t>(i)]);
    const auto where = at::nonzero(y > 0);
    const auto chosen = y.masked_select(y > 0.1);
    const auto loss = chosen.sum() * static_cast<double>(where.size(0));
    loss.backward();
    return Tensors{loss, where, chosen};
  });
}

TEST_F(EngineGlue, a_step_function_may_read_values) {
  spec_.block("a", 1);
  expect_equals_plain(spec_, 2, [data = batches(4)](Model& model, int i) {
    auto y = model("a", data[static_cast<std::size_t>(i)]);
    y = y.mean().item<float>() > 0 ? y * 2 : y * 3;
    const auto loss = loss_of(y);
    loss.backward();
    return Tensors{loss};
  });
}

TEST_F(EngineGlue, a_module_may_change_its_argument_at_home_and_elsewhere) {
  spec_.block("at_0", 0).block("at_1", 1);
  spec_.module({"change", 1, [](Model&, const Tensors& in) { return Tensors{at::sin(in[0].mul_(2))}; }});
  spec_.module({"change_home", 0, [](Model&, const Tensors& in) { return Tensors{at::cos(in[0].add_(1))}; }});
  for (const std::string block : {"at_0", "at_1"}) {
    for (const std::string change : {"change", "change_home"}) {
      SCOPED_TRACE(block + " " + change);
      expect_equals_plain(spec_, 2, [=, data = batches(4)](Model& model, int i) {
        const auto x = model(block, data[static_cast<std::size_t>(i)]) * 1;
        const auto y = model(change, x);
        const auto loss = (x * y).sum();  // x as it is now
        loss.backward();
        return Tensors{loss, x};
      });
    }
  }
}

}  // namespace
}  // namespace smp::pipeline
