"""The accounting methods: one file each, a common base class and a registry."""

from accountant_service.accountants.base import TOLERANCE, Accountant, Question
from accountant_service.accountants.registry import ACCOUNTANTS, DEFAULT_METHOD

__all__ = ["ACCOUNTANTS", "DEFAULT_METHOD", "TOLERANCE", "Accountant", "Question"]
