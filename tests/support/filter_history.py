"""A dataset's budget without a database: plans are reserved and granted one after the other."""

from __future__ import annotations

from accountant_service.ledger.filters import PrivacyFilter, from_json, read_charge
from accountant_service.ledger.filters.base import add
from accountant_service.ledger.step_plan import StepPlan


class History:
    """Reserves and grants plans one after the other, as the ledger's rules do."""

    def __init__(self, policy: PrivacyFilter) -> None:
        self.policy, self.taken = policy, policy.nothing

    def spend(self, one: StepPlan) -> bool:
        """Return whether a plan fits, and grant all of it if so."""
        policy = self.policy.after_reserving(one, self.taken)
        if policy != self.policy:
            assert self.policy.may_be_replaced(self.taken)
            assert self.policy.allows_replacement(policy, one, self.taken)
        charge = policy.compute_charge(one, self.taken)
        after = add(self.taken, charge.reserved)
        if not policy.admits(after):
            return False
        assert policy.is_charge_sufficient(one, charge)
        assert read_charge(charge.to_json(), one.steps) == charge
        assert policy.read_charge(one, charge.entry_fields()) == charge
        fields = policy.balance_fields(charge.reserved, policy.nothing)
        assert policy.read_balance(fields) == (charge.reserved, policy.nothing)
        stored = from_json(policy.to_json(), policy.epsilon, policy.delta, policy.relation)
        assert stored == policy
        self.policy, self.taken = policy, after
        return True

    def left(self, one: StepPlan) -> int | None:
        """Return how many steps of a plan still fit."""
        policy = self.policy.after_reserving(one, self.taken)
        return policy.count_affordable_steps(one, self.taken)
