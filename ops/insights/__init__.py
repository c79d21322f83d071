"""What an operator should know, worked out from events and snapshots: pure logic, time comes in as an argument.

`ops.insights.book.Insights` is the way in; `ops.insights.types` has the records that leave.
"""
