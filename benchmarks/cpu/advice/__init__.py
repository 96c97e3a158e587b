"""Does an advice keep its promise?"""
