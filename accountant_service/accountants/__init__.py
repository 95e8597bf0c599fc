"""The accounting methods: one file each, one protocol, one table."""

from accountant_service.accountants.base import Accountant, Question
from accountant_service.accountants.registry import ACCOUNTANTS, DEFAULT_METHOD

__all__ = ["ACCOUNTANTS", "DEFAULT_METHOD", "Accountant", "Question"]
