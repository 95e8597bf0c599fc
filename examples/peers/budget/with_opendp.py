import opendp.prelude as dp

dp.enable_features("contrib")
context = dp.Context.compositor(
    data=[1] * 60000,
    privacy_unit=dp.unit_of(contributions=1),
    privacy_loss=dp.loss_of(epsilon=1.0),
    split_evenly_over=1,
)
print(context.query().clamp((0, 1)).sum().laplace().release())
try:
    print(context.query().clamp((0, 1)).sum().laplace().release())
except (ValueError, dp.OpenDPException):
    print("refused")
