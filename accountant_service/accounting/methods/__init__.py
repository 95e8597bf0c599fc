"""The accounting methods: one file each, a common base class and a registry."""

from accountant_service.accounting.methods.base import TOLERANCE, Accountant, Question
from accountant_service.accounting.methods.registry import ACCOUNTANTS, DEFAULT_METHOD

__all__ = ["ACCOUNTANTS", "DEFAULT_METHOD", "TOLERANCE", "Accountant", "Question"]
